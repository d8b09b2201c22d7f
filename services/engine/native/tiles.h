/* Products of bfloat16 weights on AMX's tiles, a part of kernel.c.
 *
 * A float32 input is the exact sum of three bfloat16 numbers, each with eight of its bits, and the product of two
 * bfloat16 numbers is exact in float32. A tile has the three parts of up to TILE_ROWS rows; the products of each part
 * are added up apart, inputs in order, then the three sums. So a row gets the same bits whatever rows are beside it.
 * Numbers below 2^-126 count as zero.
 *
 * Weights lie in halves of panels, these by blocks of TILE_INPUTS inputs, the last one filled up with zeros: two tiles
 * for 16 outputs each, whose 16 rows have two inputs of all outputs side by side.
 */
#define TILE_ROWS 5 /* 3 * 5 of a tile's 16 rows */
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

/* Numbers of scratch for the parts of rows: [rows, 3, padded inputs] of two bytes, from a whole cache line on. */
static int64_t parts_size(int64_t rows, int64_t inputs) { return rows * 3 * padded(inputs) / 2 + 16; }

static uint16_t *parts_in(float *scratch) { return (uint16_t *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63); }

/* Writes the parts of rows. */
static void split(int rows, int64_t inputs, const float *x, int64_t x_stride, uint16_t *parts) {
    int64_t width = padded(inputs);
    for (int r = 0; r < rows; r++, x += x_stride, parts += 3 * width)
        for (int64_t k = 0; k < width; k += LANES) {
            float rest[LANES] = {0};
            memcpy(rest, x + k, (inputs - k < 0 ? 0 : inputs - k < LANES ? inputs - k : LANES) * sizeof(float));
            vf left = load(rest);
#pragma GCC unroll 3
            for (int part = 0; part < 3; part++) {
                vu bits = (vu)left & 0xffff0000u;
                _mm256_storeu_si256((__m256i_u *)(parts + part * width + k), _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
                left -= (vf)bits;
            }
        }
}

/* Tiles 0 to 3 have the sums, 4 and 5 the parts of up to TILE_ROWS rows each, 6 and 7 weights. */
static void configure(int rows) {
    int second = rows > TILE_ROWS ? rows - TILE_ROWS : 0, first = rows - second;
    int height[8] = {3 * first, 3 * first, 3 * second, 3 * second, 3 * first, 3 * second, 16, 16};
    tile_config config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++)
        if (height[tile]) config.row_bytes[tile] = 64, config.rows[tile] = height[tile];
    WRITTEN(&config);
    _tile_loadconfig(&config);
}

/* Two tiles of weights after the other, for one tile of parts or two; `tiles` is a constant where this is inlined. */
INLINE void multiply(const int tiles, const char *half, const uint16_t *parts, int64_t width, float *sums) {
    const uint16_t *others = parts + 3 * TILE_ROWS * width;
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
        _tile_stored(2, sums + 3 * TILE_ROWS * PANEL, 4 * PANEL);
        _tile_stored(3, sums + 3 * TILE_ROWS * PANEL + LANES, 4 * PANEL);
    }
}

/* The panels of a chunk; a panel is read from memory for the first rows, and from a cache for the others. */
static void tile_chunk(const product_task *t, int begin, int end) {
    const gr_matrix *m = t->m;
    const int64_t width = padded(m->inputs), panel_bytes = width * PANEL * 2;
    const char *panel = (const char *)m->panels + begin / PANEL * panel_bytes;
    int configured = 0;
    for (int first = begin; first < end; first += PANEL, panel += panel_bytes)
        for (int row = 0, size; row < t->rows; row += size) {
            float sums[2 * 3 * TILE_ROWS][PANEL];
            size = t->rows - row < 2 * TILE_ROWS ? t->rows - row : 2 * TILE_ROWS;
            if (size != configured) configure(configured = size);
            for (int half = 0; half < 2; half++) {
                const char *weights = panel + half * panel_bytes / 2;
                const uint16_t *parts = t->parts + row * 3 * width;
                if (size > TILE_ROWS)
                    multiply(2, weights, parts, width, sums[0] + half * PANEL / 2);
                else
                    multiply(1, weights, parts, width, sums[0] + half * PANEL / 2);
            }
            for (int r = 0; r < size; r++) {
                vf total[PANEL_VECTORS];
                for (int j = 0; j < PANEL_VECTORS; j++)
                    total[j] = load(sums[3 * r] + LANES * j) + load(sums[3 * r + 1] + LANES * j) +
                               load(sums[3 * r + 2] + LANES * j);
                put(m, total, t->y + (row + r) * t->y_stride, first, t->add);
            }
        }
    _tile_release();
}
