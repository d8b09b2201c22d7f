/* Products of bfloat16 weights on AMX's tiles, a part of kernel.c.
 *
 * A float32 input is the exact sum of three bfloat16 numbers, each with eight of its bits, and the product of two
 * bfloat16 numbers is exact in float32. A tile has the three parts of up to 5 rows; the products of each part
 * are added up apart, inputs in order, then the three sums. So a row gets the same bits whatever rows are beside it.
 * Where the model's dtype is bfloat16 (kind ROUNDED), a row has one part, its inputs rounded, and a tile 16 rows.
 * Numbers below 2^-126 count as zero.
 *
 * Weights lie in halves of panels, these by blocks of TILE_INPUTS inputs, the last one filled up with zeros: two tiles
 * for 16 outputs each, whose 16 rows have two inputs of all outputs side by side.
 */
#define TILE_HEIGHT 16
#define TILE_INPUTS 32
#define TILE_BYTES 1024
#define TILE_AHEAD (8 * TILE_BYTES) /* of what is fetched */

/* Has the compiler write what a tile instruction reads: GCC 12 does not know. */
#define WRITTEN(place) __asm__ volatile("" : : "r"(place) : "memory")

_Static_assert(PANEL == 4 * 16, "two halves of two tiles");

typedef struct {
    uint8_t palette, start;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

static int64_t padded(int64_t inputs) { return (inputs + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS; }

static int num_parts(int kind) { return kind == ROUNDED ? 1 : 3; }

/* Numbers of scratch for the parts of rows: [rows, 3, padded inputs] of two bytes, from a whole cache line on. */
static int64_t parts_size(int64_t rows, int64_t inputs) { return rows * 3 * padded(inputs) / 2 + 16; }

static uint16_t *parts_in(float *scratch) { return (uint16_t *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63); }

/* Writes the parts of rows. */
static void split(int num_parts, int rows, int64_t inputs, const float *x, int64_t x_stride, uint16_t *parts) {
    int64_t width = padded(inputs);
    for (int r = 0; r < rows; r++, x += x_stride, parts += num_parts * width)
        for (int64_t k = 0; k < width; k += LANES) {
            vf left = k < inputs ? some_inputs(x + k, inputs - k) : splat(0);
            if (num_parts == 1) {
                _mm256_storeu_si256((__m256i_u *)(parts + k), (__m256i)_mm512_cvtneps_pbh((__m512)left));
                continue;
            }
#pragma GCC unroll 3
            for (int part = 0; part < 3; part++) {
                vu bits = (vu)left & 0xffff0000u;
                _mm256_storeu_si256((__m256i_u *)(parts + part * width + k), _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
                left -= (vf)bits;
            }
        }
}

/* Tiles 0 to 3 have the sums, 4 and 5 `first` and `second` parts of rows, 6 and 7 weights. */
static void configure(int first, int second) {
    int height[8] = {first, first, second, second, first, second, TILE_HEIGHT, TILE_HEIGHT};
    tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++)
        if (height[tile]) config.row_bytes[tile] = 64, config.rows[tile] = height[tile];
    WRITTEN(&config);
    _tile_loadconfig(&config);
}

/* Two tiles of weights after the other, for one tile of parts or two; `tiles` is a constant where this is inlined. */
INLINE void multiply(const int tiles, const char *half, const uint16_t *parts, const uint16_t *others, int64_t width,
                     float *sums, float *other_sums) {
    WRITTEN(parts);
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < width; k += TILE_INPUTS, half += 2 * TILE_BYTES) {
#pragma GCC unroll 32
        for (int line = 0; line < 2 * TILE_BYTES / 64; line++) __builtin_prefetch(half + TILE_AHEAD + 64 * line);
        _tile_loadd(4, parts + k, 2 * width);
        _tile_loadd(6, half, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, half + TILE_BYTES, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (tiles == 2) {
            _tile_loadd(5, others + k, 2 * width);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 4 * PANEL);
    _tile_stored(1, sums + LANES, 4 * PANEL);
    if (tiles == 2) {
        _tile_stored(2, other_sums, 4 * PANEL);
        _tile_stored(3, other_sums + LANES, 4 * PANEL);
    }
}

/* The panels of a chunk; a panel is read from memory for the first rows, and from a cache for the others. */
static void tile_chunk(const product_task *t, int begin, int end) {
    const gr_matrix *m = t->m;
    const int each = num_parts(m->kind), most = TILE_HEIGHT / each; /* parts of a row; rows of a tile */
    const int64_t width = padded(m->inputs), panel_bytes = width * PANEL * 2;
    const char *panel = (const char *)m->panels + begin / PANEL * panel_bytes;
    int configured = 0;
    for (int first = begin; first < end; first += PANEL, panel += panel_bytes)
        for (int row = 0, size; row < t->rows; row += size) {
            float sums[2 * TILE_HEIGHT][PANEL];
            size = t->rows - row < 2 * most ? t->rows - row : 2 * most;
            const int upper = size < most ? size : most;
            if (size != configured) configure(each * upper, each * (size - upper)), configured = size;
            for (int half = 0; half < 2; half++) {
                const char *weights = panel + half * panel_bytes / 2;
                const uint16_t *parts = t->parts + row * each * width, *others = parts + each * upper * width;
                float *to = sums[0] + half * PANEL / 2, *other = sums[each * upper] + half * PANEL / 2;
                if (size > most)
                    multiply(2, weights, parts, others, width, to, other);
                else
                    multiply(1, weights, parts, NULL, width, to, NULL);
            }
            for (int r = 0; r < size; r++) {
                vf total[PANEL_VECTORS];
                for (int j = 0; j < PANEL_VECTORS; j++) {
                    total[j] = load(sums[each * r] + LANES * j);
                    for (int part = 1; part < each; part++) total[j] += load(sums[each * r + part] + LANES * j);
                }
                put(m, total, t->y + (row + r) * t->y_stride, first, t->add);
            }
        }
    _tile_release();
}
