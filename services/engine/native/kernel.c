/* A forward of Llama-like models on CPU cores, in one call and in float32 arithmetic, but for products of bfloat16
 * inputs, see pairs.h.
 *
 * What one row (one token) gets does not depend on the rows that come with it, to the last bit: every sum
 * runs over the same numbers in the same order, whatever the number of rows or threads, the batch or the shape of a
 * tree.
 * A product adds up inputs one by one, per output, in one accumulator (see pairs.h, tiles.h and integers.h for others);
 * attention walks a token's own path from its first position to its last.
 *
 * Weights lie in panels of PANEL outputs: for each input the PANEL weights side by side, float32, bfloat16 or
 * int8 (the sum is multiplied by its output's scale). A vector of bfloat16 holds two vectors' worth: the low halves
 * of its 32-bit lanes are the first, the high halves the second, so that a shift or a mask makes float32 numbers of
 * them, without rounding.
 *
 * Plain GCC/Clang vector extensions, but for conversions of integers and tiles.h; the same file is compiled once per
 * instruction set, see build.py.
 */
#define _GNU_SOURCE /* for SCHED_IDLE */
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define PANEL_VECTORS 4
#define MAX_ROWS 6
#define BLOCK 96 /* inputs: two blocks of a panel fit into the first cache */
#elif defined(__AVX2__)
#define LANES 8
#define PANEL_VECTORS 2
#define MAX_ROWS 6
#define BLOCK 192
#else
#define LANES 4
#define PANEL_VECTORS 2
#define MAX_ROWS 4
#define BLOCK 96
#endif
#define PANEL (PANEL_VECTORS * LANES)
#define GROUP_ROWS (4 * MAX_ROWS) /* rows whose sums are kept between blocks */
#define MAX_HEAD_VECTORS (256 / LANES)
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t vb __attribute__((vector_size(4 * LANES), may_alias));
typedef int16_t vh __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum { FLOAT32, BFLOAT16, INT8, ROUNDED };

typedef struct {
    const void *panels; /* [ceil(outputs / PANEL), inputs, PANEL] */
    const float *scale; /* [outputs] of int8, else NULL */
    const float *bias;  /* [outputs] or NULL */
    int32_t kind;       /* of the weights */
    int32_t outputs;
    int32_t inputs;
} gr_matrix;

typedef struct {
    gr_matrix qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_dim] or NULL */
    int32_t window;                         /* positions a row sees, itself included; 0: all */
} gr_layer;

typedef struct {
    int32_t hidden, intermediate, heads, kv_heads, head_dim, layers;
    float scaling, norm_eps;
    const void *embedding;        /* [vocab, hidden]: float32, or int8 where there are scales */
    const float *embedding_scale; /* [vocab] or NULL */
    const float *last_norm; /* [hidden] */
    gr_matrix head;         /* outputs: vocab */
    const gr_layer *layer;
    int32_t is_head;            /* a drafting head, see services/heads/eagle.py; else what follows is unused */
    int32_t residual_is_normed; /* the residual begins with the normed feature */
    int32_t state_is_normed;    /* the state after `last_norm` is recorded */
    const float *feature_norm;  /* [hidden] */
} gr_model;

typedef struct {
    float *cache;             /* [layers, 2 kv_heads, capacity, head_dim]: keys' heads, then values' */
    int64_t capacity;
    int64_t slot;             /* slot of the first row; the others follow */
    int32_t count;            /* rows */
    int32_t first;            /* slots before it are empty; its rows' positions are not below it */
} gr_segment;

typedef struct {
    int32_t rows, segments, wanted;
    const gr_segment *segment;  /* their rows in order, side by side */
    const int32_t *token;       /* [rows] */
    const int32_t *position;    /* [rows] */
    const int32_t *num_chain;   /* [rows]: position p < num_chain lies in slot p */
    const int32_t *path_offset; /* [rows]: position num_chain + i lies in slot path[path_offset + i] */
    const int32_t *path;
    const int32_t *logit_row;   /* [wanted] */
    const float *cos, *sin;     /* [positions, head_dim / 2] */
    float *scratch;             /* gr_scratch_size() numbers */
    float *logits;              /* [wanted, vocab] */
    int32_t taps;               /* hidden states to record of each row */
    const int32_t *tap;         /* [taps]: the layer that the state enters; `layers` for the last state */
    float *tapped;              /* [rows, taps, hidden] */
    const float *feature;       /* [rows, hidden] of a head, which has one tap: its last state */
    int32_t threads;            /* to compute on, at most */
    const volatile int32_t *idle_until; /* the calling thread has idle priority while this is 0; NULL: never */
    const volatile int32_t *until;      /* gr_forward ends early once this is not 0; NULL: never */
} gr_batch;

INLINE vf splat(float value) { return value - (vf){}; }
INLINE vf load(const float *from) { return *(const vf *)from; }
INLINE void store(float *to, vf value) { *(vf *)to = value; }

INLINE vf blend(vi where, vf yes, vf no) { return (vf)(((vi)yes & where) | ((vi)no & ~where)); }

INLINE vi lane_numbers(void) {
#if LANES == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

INLINE float sum_of(vf v) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) {
        vi other = lane_numbers() ^ width;
        v += __builtin_shuffle(v, other);
    }
    return v[0];
}

/* exp for x <= 0 or moderate x, to about 1e-7 of the result: 2^n times a polynomial, after Cephes. */
INLINE vf vector_exp(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f);
    x = blend(x < low, low, x);
    x = blend(x > high, high, x);
    vf n = (x * 1.44269504088896341f + magic) - magic;
    x = x - n * 0.693359375f;
    x = x + n * 2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return y * (vf)exponent;
}

#include "threads.h"

/* ---- products ---- */

INLINE vf some_inputs(const float *x, int64_t left) {
    float some[LANES] = {0};
    if (left >= LANES) return load(x);
    memcpy(some, x, left * sizeof(float));
    return load(some);
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include "pairs.h"
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
static int64_t num_pairs(int64_t inputs) { return (void)inputs, 0; }
INLINE void add_pairs(vf *sum, vf inputs, vf weights) { (void)sum, (void)inputs, (void)weights; }
#endif

/* Bytes of `inputs` inputs of a panel, or of pairs. */
INLINE int64_t panel_bytes(const int kind, int64_t inputs) {
    return inputs * PANEL * (kind == BFLOAT16 ? 2 : kind == INT8 ? 1 : 4);
}

/* A row of bfloat16 weights in float32. */
INLINE void halves_at(const char *row, vf w[PANEL_VECTORS]) {
#pragma GCC unroll 8
    for (int j = 0; j < PANEL_VECTORS / 2; j++) {
        vu pair = *(const vu *)((const uint16_t *)row + 2 * LANES * j);
        w[2 * j] = (vf)(pair << 16);
        w[2 * j + 1] = (vf)(pair & 0xffff0000u);
    }
}

/* LANES bytes as numbers; GCC would convert them by many shuffles. */
INLINE vf bytes_at(const char *from) {
#if LANES == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i_u *)from)));
#elif LANES == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#else
    vi bytes = {};
    memcpy(&bytes, from, LANES);
    vh pairs = (vh)__builtin_shuffle((vb)bytes, (vb){0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7});
    return __builtin_convertvector((vi)__builtin_shuffle(pairs, (vh){0, 0, 1, 1, 2, 2, 3, 3}) >> 24, vf);
#endif
}

/* The weights of an input from its row. */
INLINE void weights_at(const int kind, const char *row, vf w[PANEL_VECTORS]) {
    if (kind == BFLOAT16) halves_at(row, w);
#pragma GCC unroll 8
    for (int j = 0; j < PANEL_VECTORS; j++) {
        if (kind == FLOAT32 || kind == ROUNDED) w[j] = load((const float *)row + LANES * j);
        if (kind == INT8) w[j] = bytes_at(row + LANES * j);
    }
}

/* Adds the products of an input, a row of a panel, to the sums of `rows` rows. */
INLINE void add_row(const int rows, const int kind, const char *row, const float *x, int64_t x_stride,
                    vf sum[][PANEL_VECTORS]) {
    vf w[PANEL_VECTORS];
    weights_at(kind, row, w);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        vf value = splat(x[r * x_stride]);
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_VECTORS; j++)
            if (kind == ROUNDED)
                add_pairs(&sum[r][j], value, w[j]);
            else
                sum[r][j] += value * w[j];
    }
}

/* Adds the products of `inputs` inputs of a panel to the sums of `rows` rows and fetches what is `ahead`, `step`
 * bytes with each row of the panel; `rows` and `kind` are constants where this is inlined. */
INLINE void add_inputs(const int rows, const int kind, const char *panel, int64_t inputs, const float *x,
                       int64_t x_stride, const char *ahead, int64_t step, vf total[][PANEL_VECTORS]) {
    const int row_bytes = panel_bytes(kind, 1);
    /* Rows of the panel in a step, a cache line: else the loop bounds small tiles, not their arithmetic. Large ones
     * have no registers for more. */
    const int step_rows = rows > MAX_ROWS - 2 || row_bytes > 64 ? 1 : 64 / row_bytes;
    vf sum[MAX_ROWS][PANEL_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_VECTORS; j++) sum[r][j] = total[r][j];
    int64_t k = 0;
    for (; k + step_rows <= inputs; ahead += step_rows * step) {
        /* Arithmetic would wait for memory: what the hardware fetches by itself comes too late. */
        if (kind == ROUNDED && step == row_bytes / 2) { /* of two tiles: into the second cache */
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + 64, 0, 2);
        } else {
            __builtin_prefetch(ahead);
            if (row_bytes > 64) __builtin_prefetch(ahead + 64);
            if (kind == ROUNDED && step == row_bytes) __builtin_prefetch(ahead + 128), __builtin_prefetch(ahead + 192);
        }
#pragma GCC unroll 8
        for (int i = 0; i < step_rows; i++, k++, panel += row_bytes) add_row(rows, kind, panel, x + k, x_stride, sum);
    }
    for (; step_rows > 1 && k < inputs; k++, panel += row_bytes) add_row(rows, kind, panel, x + k, x_stride, sum);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < PANEL_VECTORS; j++) total[r][j] = sum[r][j];
}

#define TILE(rows, kind)                                                                                   \
    case rows:                                                                                             \
        add_inputs(rows, kind, panel, inputs, x, x_stride, ahead, step, total);                            \
        break;

#if MAX_ROWS == 6
#define LARGE_TILES(kind) TILE(5, kind) TILE(6, kind)
#else
#define LARGE_TILES(kind)
#endif

#define PRODUCT(name, kind)                                                                                \
    static void name(int rows, const char *panel, int64_t inputs, const float *x, int64_t x_stride,        \
                     const char *ahead, int64_t step, vf total[][PANEL_VECTORS]) {                         \
        switch (rows) {                                                                                    \
            TILE(1, kind) TILE(2, kind) TILE(3, kind) TILE(4, kind) LARGE_TILES(kind)                      \
        }                                                                                                  \
    }
PRODUCT(tile_float32, FLOAT32)
PRODUCT(tile_bfloat16, BFLOAT16)
PRODUCT(tile_int8, INT8)
#if HAS_PAIRS
PRODUCT(tile_pairs, ROUNDED)
#else
#define tile_pairs NULL
#endif

/* The outputs from `first` on of one row, from the sums of a panel. */
static void put(const gr_matrix *m, const vf total[PANEL_VECTORS], float *y, int first, int add) {
    int left = m->outputs - first, count = left < PANEL ? left : PANEL;
    float out[PANEL], *to = y + first;
    for (int j = 0; j < PANEL_VECTORS; j++) store(out + LANES * j, total[j]);
    if (m->kind == INT8)
        for (int i = 0; i < count; i++) out[i] *= m->scale[first + i];
    if (m->bias)
        for (int i = 0; i < count; i++) out[i] += m->bias[first + i];
    if (add)
        for (int i = 0; i < count; i++) to[i] += out[i];
    else
        memcpy(to, out, count * sizeof(float));
}

/* y = x W^T + b, or y += ...; a chunk of it is some panels. */
typedef struct {
    const gr_matrix *m;
    const float *x; /* [rows, inputs], rows x_stride apart */
    float *y;       /* [rows, outputs], rows y_stride apart */
    int64_t x_stride, y_stride;
    int rows, add, chunk_panels;
    int64_t inputs; /* rows of a panel: inputs, or pairs of them */
    const uint16_t *parts;  /* of the rows, see tiles.h */
    const float *integers;  /* of the rows, see integers.h */
} product_task;

#if defined(__AMX_BF16__)
#include "tiles.h"
#else
#define TILE_INPUTS 0
static int64_t parts_size(int64_t rows, int64_t inputs) { return (void)rows, (void)inputs, 0; }
#endif

#if defined(__AVX512VNNI__)
#include "integers.h"
#else
#define INTEGER_INPUTS 0
static int64_t integers_size(int64_t inputs) { return (void)inputs, 0; }
#endif

/* Numbers of scratch for the rows' other forms. */
static int64_t forms_size(int64_t rows, int64_t inputs) {
    int64_t integers = rows * integers_size(inputs), parts = parts_size(rows, inputs);
    int64_t most = parts > integers ? parts : integers, pairs = rows * num_pairs(inputs);
    return most > pairs ? most : pairs;
}

/* The tiles of a group of rows take a block of inputs before the next block, and each fetches its share of that:
 * weights are read from memory once, and while all rows compute. A single tile takes all inputs at once. */
static void product_chunk(const void *argument, int chunk, int thread) {
    static void (*const tiles[])(int, const char *, int64_t, const float *, int64_t, const char *, int64_t,
                                 vf[][PANEL_VECTORS]) = {tile_float32, tile_bfloat16, tile_int8, tile_pairs};
    const product_task *t = argument;
    const gr_matrix *m = t->m;
    const int kind = m->kind, rows = t->rows;
    const int64_t row_bytes = panel_bytes(kind, 1), x_stride = t->x_stride;
    const int begin = chunk * t->chunk_panels * PANEL, left = m->outputs - begin;
    const int end = begin + (left < t->chunk_panels * PANEL ? left : t->chunk_panels * PANEL);
    const char *panel = (const char *)m->panels + begin / PANEL * panel_bytes(kind, t->inputs);
    (void)thread;
#if TILE_INPUTS
    if (kind == BFLOAT16 || kind == ROUNDED) {
        tile_chunk(t, begin, end);
        return;
    }
#endif
#if INTEGER_INPUTS
    if (kind == INT8) {
        integer_chunk(t, begin, end);
        return;
    }
#endif
    for (int first = begin; first < end; first += PANEL, panel += panel_bytes(kind, t->inputs))
        for (int row = 0, size; row < rows; row += size) {
            size = rows - row < GROUP_ROWS ? rows - row : GROUP_ROWS;
            vf sum[GROUP_ROWS][PANEL_VECTORS];
            memset(sum, 0, size * sizeof(sum[0]));
            int count = (size + MAX_ROWS - 1) / MAX_ROWS;
            int64_t block = count == 1 ? t->inputs : kind == ROUNDED && count > 2 ? BLOCK / 2 : BLOCK;
            const char *from = panel;
            for (int64_t k = 0; k < t->inputs; k += block) {
                int64_t inputs = t->inputs - k < block ? t->inputs - k : block, bytes = panel_bytes(kind, inputs);
                for (int tile = 0, at = 0, height; tile < count; tile++, at += height) {
                    height = (size - at + count - tile - 1) / (count - tile); /* 7 rows are 4 + 3, not 6 + 1 */
                    int64_t ahead = count == 1 ? row_bytes * (kind == INT8 ? 96 : 48) : bytes + bytes * tile / count;
                    tiles[kind](height, from, inputs, t->x + (row + at) * x_stride + k, x_stride, from + ahead,
                                row_bytes / count, sum + at);
                }
                from += bytes;
            }
            for (int r = 0; r < size; r++) put(m, sum[r], t->y + (row + r) * t->y_stride, first, t->add);
        }
}

#define CHUNKS_PER_THREAD 4 /* more than one: a late or slow thread takes fewer of them */

static void product(int threads, const gr_matrix *m, int rows, const float *x, int64_t x_stride, float *y,
                    int64_t y_stride, int add, float *scratch) {
    int panels = (m->outputs + PANEL - 1) / PANEL, chunks = threads == 1 ? 1 : CHUNKS_PER_THREAD * threads;
    int chunk_panels = (panels + chunks - 1) / chunks;
    product_task t = {m, x, y, x_stride, y_stride, rows, add, chunk_panels, m->inputs, NULL, scratch};
#if TILE_INPUTS
    if (m->kind == BFLOAT16 || m->kind == ROUNDED)
        split(num_parts(m->kind), rows, m->inputs, x, x_stride, (uint16_t *)(t.parts = parts_in(scratch)));
#endif
#if INTEGER_INPUTS
    if (m->kind == INT8) to_integers(rows, m->inputs, x, x_stride, scratch);
#endif
#if HAS_PAIRS
    if (m->kind == ROUNDED) {
        to_pairs(rows, m->inputs, x, x_stride, scratch);
        t.x = scratch, t.x_stride = t.inputs = num_pairs(m->inputs);
    }
#endif
    run(product_chunk, &t, (panels + t.chunk_panels - 1) / t.chunk_panels, threads);
}

/* ---- the rest of a layer ---- */

static void embed(const gr_model *m, int32_t token, float *x) {
    int64_t from = (int64_t)token * m->hidden;
    if (!m->embedding_scale) {
        memcpy(x, (const float *)m->embedding + from, m->hidden * sizeof(float));
        return;
    }
    const int8_t *row = (const int8_t *)m->embedding + from;
    for (int i = 0; i < m->hidden; i++) x[i] = row[i] * m->embedding_scale[token];
}

static void rms_norm(const float *x, const float *weight, float *y, int size, float eps) {
    vf squares = splat(0);
    float tail = 0;
    int i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < size; i++) tail += x[i] * x[i];
    float scale = 1.0f / sqrtf((sum_of(squares) + tail) / size + eps);
    for (i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
}

static void rotate(float *head, const float *cos, const float *sin, int half, float scale) {
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = (a * cos[i] - b * sin[i]) * scale;
        head[i + half] = (b * cos[i] + a * sin[i]) * scale;
    }
}

static void gate(float *gate_up, int size) {
    float *up = gate_up + size;
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf g = load(gate_up + i);
        store(gate_up + i, g / (1.0f + vector_exp(-g)) * load(up + i));
    }
    if (i < size) { /* the same arithmetic for the rest */
        float rest[LANES] = {0};
        memcpy(rest, gate_up + i, (size - i) * sizeof(float));
        vf g = load(rest);
        store(rest, g / (1.0f + vector_exp(-g)));
        for (int j = 0; i + j < size; j++) gate_up[i + j] = rest[j] * up[i + j];
    }
}

#include "attention.h"

EXPORT int32_t gr_panel(void) { return PANEL; }
EXPORT int32_t gr_lanes(void) { return LANES; }
EXPORT int32_t gr_tile_inputs(void) { return TILE_INPUTS; }
EXPORT int32_t gr_integer_inputs(void) { return INTEGER_INPUTS; }
EXPORT int32_t gr_can_round(void) { return HAS_PAIRS || TILE_INPUTS; }

/* Inputs of the largest matrix. */
static int64_t widest(const gr_model *m) {
    int64_t width = (m->is_head ? 2 : 1) * m->hidden, mixed = m->heads * m->head_dim;
    if (width < mixed) width = mixed;
    return width < m->intermediate ? m->intermediate : width;
}

/* Numbers of scratch that a forward of `rows` rows up to `position` needs on `threads` threads. */
EXPORT int64_t gr_scratch_size(const gr_model *m, int32_t rows, int32_t position, int32_t threads) {
    int64_t width = (m->heads + 2 * m->kv_heads) * m->head_dim;
    int64_t per_row = (m->is_head ? 4 : 2) * m->hidden + width + m->heads * m->head_dim + 2 * m->intermediate;
    return rows * per_row + threads * attention_scratch(position) + forms_size(rows, widest(m));
}

/* Records the rows of `x` for the taps at `layer`. */
static void record(const gr_batch *b, int layer, const float *x, int hidden) {
    for (int t = 0; t < b->taps; t++)
        if (b->tap[t] == layer)
            for (int r = 0; r < b->rows; r++)
                memcpy(b->tapped + ((int64_t)r * b->taps + t) * hidden, x + (int64_t)r * hidden, hidden * sizeof(float));
}

/* Computes what enters a head's layer: in `x` the residual, in `joined` the input of its attention, [rows, 2 hidden]. */
static void enter(const gr_model *m, const gr_batch *b, float *x, float *joined) {
    int hidden = m->hidden;
    for (int r = 0; r < b->rows; r++) {
        const float *feature = b->feature + (int64_t)r * hidden;
        float *to = joined + (int64_t)r * 2 * hidden, *residual = x + (int64_t)r * hidden;
        embed(m, b->token[r], residual);
        rms_norm(residual, m->layer->attention_norm, to, hidden, m->norm_eps);
        rms_norm(feature, m->feature_norm, to + hidden, hidden, m->norm_eps);
        memcpy(residual, m->residual_is_normed ? to + hidden : feature, hidden * sizeof(float));
    }
}

/* Gives the calling thread idle priority while `idle_until` is 0; returns the policy to restore, -1 for none. This is
 * done here and not in Python: a thread of idle priority that holds the interpreter's lock blocks all others. */
static int begin_idle(const gr_batch *b) {
#ifdef SCHED_IDLE
    if (!b->idle_until || *b->idle_until) return -1;
    struct sched_param none = {0};
    int usual = sched_getscheduler(0);
    if (usual < 0 || sched_setscheduler(0, SCHED_IDLE, &none)) return -1;
    if (!*b->idle_until) return usual; /* else preempt() may have restored the priority already */
    sched_setscheduler(0, usual, &none);
#endif
    return -1;
}

static void end_idle(int usual) {
#ifdef SCHED_IDLE
    struct sched_param none = {0};
    if (usual >= 0) sched_setscheduler(0, usual, &none);
#endif
}

/* Fills the rows' slots of the caches, the logits of the wanted rows and the tapped states. Returns 0, or 1 without
 * logits if it ended early. */
static int32_t forward(const gr_model *m, const gr_batch *b) {
    int hidden = m->hidden, inner = m->intermediate, rows = b->rows, threads = b->threads;
    int width = (m->heads + 2 * m->kv_heads) * m->head_dim, mixed_width = m->heads * m->head_dim;
    float *x = b->scratch, *h = x + (int64_t)rows * hidden, *qkv = h + (int64_t)rows * hidden;
    float *mixed = qkv + (int64_t)rows * width, *gate_up = mixed + (int64_t)rows * mixed_width;
    float *joined = gate_up + (int64_t)rows * 2 * inner, *parts = joined + (m->is_head ? 2 * rows * hidden : 0);
    float *scores = parts + forms_size(rows, widest(m));
    if (m->is_head)
        enter(m, b, x, joined);
    else
        for (int r = 0; r < rows; r++) embed(m, b->token[r], x + (int64_t)r * hidden);
    for (int i = 0; i < m->layers; i++) {
        const gr_layer *layer = m->layer + i;
        if (b->until && *b->until) return 1;
        record(b, i, x, hidden);
        for (int r = 0; !m->is_head && r < rows; r++)
            rms_norm(x + (int64_t)r * hidden, layer->attention_norm, h + (int64_t)r * hidden, hidden, m->norm_eps);
        product(threads, &layer->qkv, rows, m->is_head ? joined : h, m->is_head ? 2 * hidden : hidden, qkv, width, 0, parts);
        attention(threads, m, b, layer, i, qkv, mixed, scores);
        product(threads, &layer->out, rows, mixed, mixed_width, x, hidden, 1, parts);
        for (int r = 0; r < rows; r++)
            rms_norm(x + (int64_t)r * hidden, layer->mlp_norm, h + (int64_t)r * hidden, hidden, m->norm_eps);
        product(threads, &layer->gate_up, rows, h, hidden, gate_up, 2 * inner, 0, parts);
        for (int r = 0; r < rows; r++) gate(gate_up + (int64_t)r * 2 * inner, inner);
        product(threads, &layer->down, rows, gate_up, 2 * inner, x, hidden, 1, parts);
    }
    if (m->state_is_normed)
        for (int r = 0; r < rows; r++)
            rms_norm(x + (int64_t)r * hidden, m->last_norm, b->tapped + (int64_t)r * hidden, hidden, m->norm_eps);
    else
        record(b, m->layers, x, hidden);
    for (int w = 0; w < b->wanted; w++) {
        const float *from = x + (int64_t)b->logit_row[w] * hidden;
        rms_norm(from, m->last_norm, h + (int64_t)w * hidden, hidden, m->norm_eps);
    }
    product(threads, &m->head, b->wanted, h, hidden, b->logits, m->head.outputs, 0, parts);
    return 0;
}

EXPORT int32_t gr_forward(const gr_model *m, const gr_batch *b) {
    int32_t usual = begin_idle(b), has_ended_early = forward(m, b);
    end_idle(usual);
    return has_ended_early;
}

/* Feeds the rows of `b`, one segment that is a chain: those before the wanted ones together with the first
 * wanted one, then the others one after another. After each forward the token with the largest score is the
 * next row's: its logit, or where there is noise [wanted, vocab] the logit times `scale` plus the noise. `id`
 * [outputs of the head] are the tokens of the logits; NULL: all, in order. Of a head, `feature` has the rows of
 * the first forward. Returns the number of forwards: all, or up to the one during which `*stop` was set. */
EXPORT int32_t gr_chain(const gr_model *m, const gr_batch *b, int32_t *token, const double *noise, int64_t vocab,
                        const int32_t *id, double scale, const volatile int32_t *stop) {
    int32_t outputs = m->head.outputs, last = b->rows - b->wanted, row = 0, run = 0, usual = begin_idle(b);
    gr_segment segment = *b->segment;
    gr_batch one = *b;
    one.rows = segment.count = last + 1;
    one.segments = one.wanted = 1, one.taps = m->is_head ? 1 : 0;
    one.segment = &segment, one.logit_row = &last;
    while (run < b->wanted) {
        one.token = token + row, one.position = b->position + row, one.num_chain = b->num_chain + row;
        one.path_offset = b->path_offset + row, one.logits = b->logits + (int64_t)run * outputs;
        forward(m, &one);
        if (m->is_head) one.tapped += (int64_t)one.rows * m->hidden, one.feature = one.tapped - m->hidden;
        const double *added = noise ? noise + run * vocab : 0;
        row += one.rows, segment.slot += one.rows, run++;
        one.rows = segment.count = 1, last = 0;
        if (*stop || run == b->wanted) break;
        double best = -INFINITY;
        int32_t place = 0;
        for (int32_t i = 0; i < outputs; i++) {
            double score = added ? one.logits[i] * scale + added[id ? id[i] : i] : one.logits[i];
            if (score > best) best = score, place = i;
        }
        token[row] = id ? id[place] : place;
    }
    end_idle(usual);
    return run;
}

/* Numbers of scratch that `gr_map` needs. */
EXPORT int64_t gr_map_scratch_size(const gr_matrix *m, int32_t rows) { return forms_size(rows, m->inputs); }

/* The products of rows [rows, inputs] with a matrix, [rows, outputs], on up to `threads` threads. */
EXPORT void gr_map(const gr_matrix *m, int32_t rows, const float *x, float *y, float *scratch, int32_t threads) {
    product(threads, m, rows, x, m->inputs, y, m->outputs, 0, scratch);
}

#include "draws.h"

/* ---- guesses ---- */

#define MAX_GUESSES 16

#define GUESS_BLOCK 64

/* The `count` largest of `size` scores, best first, the lower index first among equals: their indices, and
 * their share of sum exp(score / temperature). Returns how many there are. */
#define GUESSES(name, number)                                                                              \
    EXPORT int32_t name(const number *scores, int64_t size, int32_t count, float temperature,              \
                        int32_t *index, float *share) {                                                    \
        number best[MAX_GUESSES];                                                                          \
        int32_t found = 0;                                                                                 \
        if (count > MAX_GUESSES) count = MAX_GUESSES;                                                      \
        for (int64_t from = 0; from < size; from += GUESS_BLOCK) {                                         \
            int64_t to = from + GUESS_BLOCK < size ? from + GUESS_BLOCK : size;                            \
            if (found == count && to - from == GUESS_BLOCK) {                                              \
                int32_t is_better = 0;                                                                     \
                for (int64_t j = 0; j < GUESS_BLOCK; j++) is_better |= scores[from + j] > best[found - 1]; \
                if (!is_better) continue;                                                                  \
            }                                                                                              \
            for (int64_t i = from; i < to; i++) {                                                          \
                if (found == count && !(scores[i] > best[found - 1])) continue;                            \
                int32_t at = found < count ? found++ : found - 1;                                          \
                for (; at > 0 && scores[i] > best[at - 1]; at--)                                           \
                    best[at] = best[at - 1], index[at] = index[at - 1];                                    \
                best[at] = scores[i], index[at] = (int32_t)i;                                              \
            }                                                                                              \
        }                                                                                                  \
        if (!found) return 0;                                                                              \
        const float colder = 1.0f / temperature;                                                           \
        vf total = splat(0);                                                                               \
        for (int64_t i = 0; i < size; i += LANES) {                                                        \
            float part[LANES];                                                                             \
            if (i + LANES <= size)                                                                         \
                for (int64_t j = 0; j < LANES; j++) part[j] = (float)(scores[i + j] - best[0]) * colder; \
            else                                                                                           \
                for (int64_t j = 0; j < LANES; j++)                                                        \
                    part[j] = i + j < size ? (float)(scores[i + j] - best[0]) * colder : -INFINITY; \
            vf x = load(part);                                                                             \
            total += blend(x < splat(-87.0f), splat(0), vector_exp(x));                                   \
        }                                                                                                  \
        float sum = sum_of(total);                                                                         \
        for (int32_t i = 0; i < found; i++) share[i] = expf((float)(best[i] - best[0]) * colder) / sum; \
        return found;                                                                                      \
    }
GUESSES(gr_guesses_float32, float)
GUESSES(gr_guesses_float64, double)
