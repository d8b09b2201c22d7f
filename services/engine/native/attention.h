/* Attention of the kernel, a part of kernel.c.
 *
 * The rows of a segment and the query heads of a group see mostly the same keys: these are read once for all
 * of them. Every query still sums in one order, whatever other queries are computed with it: over a key's
 * numbers as `dots` does, over values from its first position to its last.
 */

#define KEYS 4 /* whose products with a query are added up together */
#define BLOCK_VALUES 4096 /* numbers that all queries add up before the next: they stay in the first cache */
#define MAX_QUERIES 16
#if LANES == 16
#define VALUE_QUERIES 4 /* that share a read of values; their sums stay in registers */
#else
#define VALUE_QUERIES 1
#endif

/* One row's positions: `first` to `last`; those below `num_chain` lie in slots of the same number. */
typedef struct {
    int32_t first, last, num_chain;
    const int32_t *path;
} view;

INLINE int64_t slot_of(const view *v, int32_t position) {
    return position < v->num_chain ? position : v->path[position - v->num_chain];
}

/* The j-th vector of a head of `dim` numbers, filled up with zeros at the head's end. */
INLINE vf load_part(const float *head, int j, int dim) {
    if ((j + 1) * LANES <= dim) return load(head + j * LANES);
    float part[LANES] = {0};
    memcpy(part, head + j * LANES, (dim - j * LANES) * sizeof(float));
    return load(part);
}

INLINE void store_part(float *head, int j, int dim, vf value) {
    if ((j + 1) * LANES <= dim) {
        store(head + j * LANES, value);
        return;
    }
    float part[LANES];
    store(part, value);
    memcpy(head + j * LANES, part, (dim - j * LANES) * sizeof(float));
}

/* Products of a query with four keys; all four are added up alike. */
INLINE void dots(const int dim, const float *query, const float *const key[KEYS], float out[KEYS]) {
    const int vectors = (dim + LANES - 1) / LANES;
    const vi n = lane_numbers(), quad = n & ~3, even = quad + ((n & 3) >> 1) + (n & 1) * LANES;
    const vi low = quad + (n & 1) + ((n & 3) >> 1) * LANES;
    vf product[KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < KEYS; i++) product[i] = load_part(query, 0, dim) * load_part(key[i], 0, dim);
#pragma GCC unroll 16
    for (int j = 1; j < vectors; j++) {
        vf q = load_part(query, j, dim);
#pragma GCC unroll 4
        for (int i = 0; i < KEYS; i++) product[i] += q * load_part(key[i], j, dim);
    }
    /* Transposes groups of four lanes while it adds. */
    vf a = __builtin_shuffle(product[0], product[1], even) + __builtin_shuffle(product[0], product[1], even + 2);
    vf b = __builtin_shuffle(product[2], product[3], even) + __builtin_shuffle(product[2], product[3], even + 2);
    vf sum = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + 2);
#pragma GCC unroll 4
    for (int width = LANES / 2; width >= 4; width /= 2) sum += __builtin_shuffle(sum, n ^ width);
    memcpy(out, &sum, KEYS * sizeof(float));
}

/* Scores of the positions from `from` up to `to`, which lie anywhere; `scores` is by position. */
INLINE void score_one(const int dim, const float *query, const float *keys, const view *v, int32_t from,
                      int32_t to, float *scores) {
    for (int32_t p = from; p < to; p += KEYS) {
        const float *key[KEYS];
        float out[KEYS];
        int count = to - p < KEYS ? to - p : KEYS;
        for (int i = 0; i < KEYS; i++) key[i] = keys + slot_of(v, p + (i < count ? i : 0)) * dim;
        dots(dim, query, key, out);
        memcpy(scores + p, out, count * sizeof(float));
    }
}

/* Makes scores weights, not yet divided by their sum; returns what to multiply by for that. */
INLINE float soften(float *scores, int count) {
    for (int i = count; i % LANES; i++) scores[i] = -INFINITY;
    vf most = load(scores), total = splat(0);
    for (int i = LANES; i < count; i += LANES) {
        vf score = load(scores + i);
        most = blend(score > most, score, most);
    }
    float largest = most[0];
    for (int i = 1; i < LANES; i++)
        if (most[i] > largest) largest = most[i];
    for (int i = 0; i < count; i += LANES) {
        vf score = load(scores + i);
        vf e = blend(score == splat(-INFINITY), splat(0), vector_exp(score - largest));
        store(scores + i, e);
        total += e;
    }
    return 1.0f / sum_of(total);
}

/* Adds the weighted values of the positions from `from` up to `to` of `count` queries, which lie in slots of the
 * same number where `v` is NULL. `count` and `dim` are constants where this is inlined. */
INLINE void add_values(const int dim, const int count, const float *values, const view *v, int32_t from, int32_t to,
                       const float *const weight[], float *const out[]) {
    const int vectors = (dim + LANES - 1) / LANES;
    vf sum[VALUE_QUERIES][MAX_HEAD_VECTORS];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++) sum[q][j] = load_part(out[q], j, dim);
    for (int32_t p = from; p < to; p++) {
        const float *value = values + (v ? slot_of(v, p) : p) * dim;
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) {
            vf w = splat(weight[q][p]);
#pragma GCC unroll 16
            for (int j = 0; j < vectors; j++) sum[q][j] += w * load_part(value, j, dim);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 16
        for (int j = 0; j < vectors; j++) store_part(out[q], j, dim, sum[q][j]);
}

/* Some queries of one key head: query i is one of row i / group. `dim` may be a constant where this is inlined. */
INLINE void attend(const int dim, int num_queries, int group, const float *const query[], const float *keys,
                   const float *values, const view *rows, float *scores, int64_t stride, float *const out[]) {
    const int vectors = (dim + LANES - 1) / LANES;
    /* Positions that all rows have in slots of the same number. */
    int32_t low = 0, high = INT32_MAX;
    for (int r = 0; r * group < num_queries; r++) {
        const view *v = rows + r;
        int32_t end = v->num_chain <= v->last ? v->num_chain : v->last + 1;
        low = v->first > low ? v->first : low;
        high = end < high ? end : high;
    }
    if (high < low) high = low;
    int32_t whole = low + (high - low) / KEYS * KEYS;
    for (int32_t p = low; p < whole; p += KEYS) {
        const float *key[KEYS];
        for (int i = 0; i < KEYS; i++) key[i] = keys + (int64_t)(p + i) * dim;
        for (int q = 0; q < num_queries; q++)
            dots(dim, query[q], key, scores + q * stride + p);
    }
    const float *weight[MAX_QUERIES];
    float scale[MAX_QUERIES];
    for (int q = 0; q < num_queries; q++) {
        const view *v = rows + q / group;
        float *own = scores + q * stride;
        /* A window may begin where no other row's does. */
        score_one(dim, query[q], keys, v, v->first, low < v->last + 1 ? low : v->last + 1, own);
        score_one(dim, query[q], keys, v, whole > v->first ? whole : v->first, v->last + 1, own);
        scale[q] = soften(own + v->first, v->last - v->first + 1);
        weight[q] = own;
        for (int j = 0; j < vectors; j++) store_part(out[q], j, dim, splat(0));
        add_values(dim, 1, values, v, v->first, low < v->last + 1 ? low : v->last + 1, weight + q, out + q);
    }
    for (int32_t p = low, end; p < high; p = end) {
        end = high - p < BLOCK_VALUES / dim ? high : p + BLOCK_VALUES / dim;
        int q = 0;
        for (; q + VALUE_QUERIES <= num_queries; q += VALUE_QUERIES)
            add_values(dim, VALUE_QUERIES, values, NULL, p, end, weight + q, out + q);
#if VALUE_QUERIES == 4
        if (q + 2 <= num_queries) add_values(dim, 2, values, NULL, p, end, weight + q, out + q), q += 2;
        if (q < num_queries) add_values(dim, 1, values, NULL, p, end, weight + q, out + q);
#endif
    }
    for (int q = 0; q < num_queries; q++) {
        const view *v = rows + q / group;
        add_values(dim, 1, values, v, high > v->first ? high : v->first, v->last + 1, weight + q, out + q);
        for (int j = 0; j < vectors; j++) store_part(out[q], j, dim, load_part(out[q], j, dim) * scale[q]);
    }
}

static void attend_heads(int dim, int num_queries, int group, const float *const query[], const float *keys,
                         const float *values, const view *rows, float *scores, int64_t stride, float *const out[]) {
    if (dim == 64)
        attend(64, num_queries, group, query, keys, values, rows, scores, stride, out);
    else if (dim == 128)
        attend(128, num_queries, group, query, keys, values, rows, scores, stride, out);
    else
        attend(dim, num_queries, group, query, keys, values, rows, scores, stride, out);
}

INLINE int64_t score_stride(int32_t position) { return position + 1 + 2 * LANES; }

/* The attention of one layer; a chunk of it is some rows of a segment that see the same heads of keys. */
typedef struct {
    const gr_model *m;
    const gr_batch *b;
    const gr_layer *layer;
    int index; /* of the layer */
    float *qkv, *mixed, *scores;
    int64_t score_size; /* numbers of `scores` that a thread has for itself */
} attention_task;

static float *layer_cache(const attention_task *t, const gr_segment *s) {
    return s->cache + (int64_t)t->index * 2 * t->m->kv_heads * s->capacity * t->m->head_dim;
}

static int row_width(const gr_model *m) { return (m->heads + 2 * m->kv_heads) * m->head_dim; }

/* Rotates the rows of a segment and copies their keys and values to the cache. */
static void store_rows(const attention_task *t, const gr_segment *s, int first_row) {
    const gr_model *m = t->m;
    int dim = m->head_dim, half = dim / 2;
    int64_t head_size = s->capacity * dim;
    float *cache = layer_cache(t, s);
    for (int r = 0; r < s->count; r++) {
        float *row = t->qkv + (int64_t)(first_row + r) * row_width(m);
        const float *cos = t->b->cos + (int64_t)t->b->position[first_row + r] * half;
        const float *sin = t->b->sin + (int64_t)t->b->position[first_row + r] * half;
        for (int h = 0; h < m->heads + m->kv_heads; h++) {
            const float *norm = h < m->heads ? t->layer->query_norm : t->layer->key_norm;
            if (norm) rms_norm(row + h * dim, norm, row + h * dim, dim, m->norm_eps);
            rotate(row + h * dim, cos, sin, half, h < m->heads ? m->scaling : 1.0f);
        }
        for (int h = 0; h < 2 * m->kv_heads; h++)
            memcpy(cache + h * head_size + (s->slot + r) * dim, row + (m->heads + h) * dim, dim * sizeof(float));
    }
}

/* How the queries of a segment are divided: `rows` rows and `heads` heads of a group at once. A group of more than
 * MAX_QUERIES heads comes in several parts. */
typedef struct {
    int group, heads, rows;
    int parts; /* of all heads */
} division;

static division divide(const gr_model *m) {
    int group = m->heads / m->kv_heads, heads = group < MAX_QUERIES ? group : MAX_QUERIES;
    return (division){group, heads, MAX_QUERIES / heads, m->kv_heads * ((group + heads - 1) / heads)};
}

static int segment_chunks(const division *d, const gr_segment *s) {
    return (s->count + d->rows - 1) / d->rows * d->parts;
}

static void attention_chunk(const void *argument, int chunk, int thread) {
    const attention_task *t = argument;
    const gr_model *m = t->m;
    const gr_batch *b = t->b;
    const division d = divide(m);
    const gr_segment *s = b->segment;
    int first_row = 0, dim = m->head_dim, most = 0, per_group = d.parts / m->kv_heads;
    for (; chunk >= segment_chunks(&d, s); first_row += s++->count) chunk -= segment_chunks(&d, s);
    int r = chunk / d.parts * d.rows, count = s->count - r < d.rows ? s->count - r : d.rows;
    int kv_head = chunk % d.parts / per_group, skipped = chunk % per_group * d.heads;
    int part = d.group - skipped < d.heads ? d.group - skipped : d.heads, h = kv_head * d.group + skipped;
    view seen[MAX_QUERIES];
    const float *query[MAX_QUERIES];
    float *out[MAX_QUERIES];
    for (int i = 0; i < count; i++) {
        int row = first_row + r + i, position = b->position[row];
        seen[i] = (view){s->first, position, b->num_chain[row], b->path + b->path_offset[row]};
        if (t->layer->window && position - t->layer->window >= s->first)
            seen[i].first = position - t->layer->window + 1;
        if (position > most) most = position;
    }
    for (int q = 0; q < count * part; q++) {
        int64_t row = first_row + r + q / part;
        query[q] = t->qkv + row * row_width(m) + (h + q % part) * dim;
        out[q] = t->mixed + (row * m->heads + h + q % part) * dim;
    }
    int64_t head_size = s->capacity * dim;
    const float *keys = layer_cache(t, s) + kv_head * head_size;
    attend_heads(dim, count * part, part, query, keys, keys + m->kv_heads * head_size, seen,
                 t->scores + thread * t->score_size, score_stride(most), out);
}

/* Numbers of scratch that a thread needs for the attention of rows up to `position`. */
INLINE int64_t attention_scratch(int32_t position) { return MAX_QUERIES * score_stride(position); }

/* Keys and values of all rows go to the caches, then each row attends. */
static void attention(int threads, const gr_model *m, const gr_batch *b, const gr_layer *layer, int index, float *qkv,
                      float *mixed, float *scores) {
    const division d = divide(m);
    attention_task t = {m, b, layer, index, qkv, mixed, scores, 0};
    int chunks = 0, most = 0;
    for (int r = 0; r < b->rows; r++)
        if (b->position[r] > most) most = b->position[r];
    t.score_size = attention_scratch(most);
    for (int s = 0, row = 0; s < b->segments; row += b->segment[s++].count) {
        store_rows(&t, b->segment + s, row);
        chunks += segment_chunks(&d, b->segment + s);
    }
    run(attention_chunk, &t, chunks, threads);
}
