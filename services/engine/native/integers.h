/* Products of int8 weights in integers (AVX512-VNNI), a part of kernel.c.
 *
 * The inputs of a row become 16-bit integers, multiples of 1/LARGEST of the largest one. With 2^15 added, each is two
 * unsigned bytes, and the products of either byte with the weights are added up exactly. So a row gets the same bits
 * whatever rows are beside it, and two instructions have the products of four inputs, or on AMX's tiles of 64 inputs of
 * 16 rows. Logits of Qwen2.5-Coder-0.5B differ from those of float32 by 6e-4 of the largest one; with 24 bits by less
 * than 1e-4, for a third more time.
 *
 * A panel begins with PANEL 32-bit integers, what the 2^15 add to the sums of the high bytes, negated; then it has the
 * weights of four inputs of each output side by side, the last ones filled up with zeros.
 */
#define INTEGER_INPUTS 4
#define BYTES 2
#define LARGEST 32767.0f
#define INTEGER_ROWS 3 /* two sums of four vectors each, within 32 registers */
#define GROUP_BYTES (INTEGER_INPUTS * PANEL)

_Static_assert(PANEL == 4 * 16, "four vectors of integers");

static int64_t num_groups(int64_t inputs) { return (inputs + INTEGER_INPUTS - 1) / INTEGER_INPUTS; }

/* Numbers of scratch per row: its step, its high bytes, its low bytes. */
static int64_t integers_size(int64_t inputs) { return 1 + BYTES * num_groups(inputs); }

static void to_integers(int rows, int64_t inputs, const float *x, int64_t x_stride, float *to) {
    int64_t width = INTEGER_INPUTS * num_groups(inputs);
    for (int r = 0; r < rows; r++, x += x_stride, to += integers_size(inputs)) {
        vf most = splat(0);
        for (int64_t k = 0; k < inputs; k += LANES) {
            vf size = (vf)((vu)some_inputs(x + k, inputs - k) & 0x7fffffffu);
            most = blend(size > most, size, most);
        }
        float largest = 0;
        for (int j = 0; j < LANES; j++) largest = most[j] > largest ? most[j] : largest;
        float per_step = largest > 0 ? LARGEST / largest : 0;
        uint8_t *bytes = (uint8_t *)(to + 1);
        *to = largest / LARGEST;
        for (int64_t k = 0; k < inputs; k += LANES) {
            __m512i number = _mm512_cvtps_epi32((__m512)(some_inputs(x + k, inputs - k) * per_step));
            number = _mm512_add_epi32(number, _mm512_set1_epi32(1 << 15));
            __mmask16 mask = (__mmask16)((1u << (width - k < LANES ? width - k : LANES)) - 1);
            for (int byte = 0; byte < BYTES; byte++)
                _mm512_mask_cvtepi32_storeu_epi8(bytes + byte * width + k, mask, _mm512_srli_epi32(number, 8 - 8 * byte));
        }
    }
}

/* As _mm512_dpbusd_epi32, for which GCC 12 keeps the sums in memory. */
INLINE void add_products(__m512i *sum, __m512i bytes, __m512i weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(bytes), "v"(weights));
}

INLINE vf integer_sum(__m512i high, __m512i low, float step) {
    return ((vf)_mm512_cvtepi32_ps(high) * 256.0f + (vf)_mm512_cvtepi32_ps(low)) * step;
}

/* Puts the sums of a panel for `rows` rows, a constant where this is inlined, into `total`, and fetches what is
 * `ahead`, `step` bytes with each group. */
INLINE void add_groups(const int rows, const char *panel, int64_t inputs, const float *x, const char *ahead,
                       int64_t step, vf total[][PANEL_VECTORS]) {
    const int64_t groups = num_groups(inputs), stride = integers_size(inputs);
    __m512i sum[INTEGER_ROWS][BYTES][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) {
            sum[r][0][j] = _mm512_loadu_si512(panel + 64 * j);
            sum[r][1][j] = _mm512_setzero_si512();
        }
    for (int64_t g = 0; g < groups; g++, ahead += step) {
        panel += GROUP_BYTES;
        for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        __m512i w[4];
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_si512(panel + 64 * j);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int byte = 0; byte < BYTES; byte++) {
                __m512i four = (__m512i)splat(x[r * stride + 1 + byte * groups + g]);
#pragma GCC unroll 8
                for (int j = 0; j < 4; j++) add_products(&sum[r][byte][j], four, w[j]);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < 4; j++) total[r][j] = integer_sum(sum[r][0][j], sum[r][1][j], x[r * stride]);
}

#if TILE_INPUTS
#define TILE_BYTE_INPUTS 64

/* The same sums of up to TILE_HEIGHT rows on tiles: 0 and 1 have those of the high bytes, 2 and 3 those of the low
 * ones, 4 and 5 the bytes, 6 and 7 weights. The number of inputs is a multiple of TILE_BYTE_INPUTS. */
static void add_tiles(int rows, const char *panel, int64_t inputs, const float *x, int is_first,
                      vf total[][PANEL_VECTORS]) {
    const int64_t stride = integers_size(inputs);
    const char *high = (const char *)(x + 1), *low = high + inputs;
    WRITTEN(x);
    for (int half = 0; half < 2; half++) {
        __m512i sum[4][TILE_HEIGHT];
        const char *weights = panel + GROUP_BYTES + half * GROUP_BYTES / 2;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < inputs; k += TILE_BYTE_INPUTS, weights += PANEL * TILE_BYTE_INPUTS) {
            if (is_first && half == 0)
                for (int line = 0; line < PANEL; line++) __builtin_prefetch(weights + TILE_AHEAD + 64 * line);
            _tile_loadd(4, high + k, 4 * stride);
            _tile_loadd(6, weights, GROUP_BYTES);
            _tile_dpbusd(0, 4, 6);
            _tile_loadd(7, weights + 64, GROUP_BYTES);
            _tile_dpbusd(1, 4, 7);
            _tile_loadd(5, low + k, 4 * stride);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(0, sum[0], 64);
        _tile_stored(1, sum[1], 64);
        _tile_stored(2, sum[2], 64);
        _tile_stored(3, sum[3], 64);
        for (int j = 0; j < 2; j++) {
            __m512i added = _mm512_loadu_si512(panel + 64 * (2 * half + j));
            for (int r = 0; r < rows; r++)
                total[r][2 * half + j] = integer_sum(_mm512_add_epi32(sum[j][r], added), sum[2 + j][r], x[r * stride]);
        }
    }
}

static void tile_integers(const product_task *t, int begin, int end) {
    const gr_matrix *m = t->m;
    const int64_t inputs = m->inputs, bytes = GROUP_BYTES * (1 + num_groups(inputs)), stride = integers_size(inputs);
    const char *panel = (const char *)m->panels + begin / PANEL * bytes;
    int configured = 0;
    for (int first = begin; first < end; first += PANEL, panel += bytes)
        for (int row = 0, rows; row < t->rows; row += rows) {
            vf total[TILE_HEIGHT][PANEL_VECTORS];
            rows = t->rows - row < TILE_HEIGHT ? t->rows - row : TILE_HEIGHT;
            if (rows != configured) configure(rows, rows), configured = rows;
            add_tiles(rows, panel, inputs, t->integers + row * stride, row == 0, total);
            for (int r = 0; r < rows; r++) put(m, total[r], t->y + (row + r) * t->y_stride, first, t->add);
        }
    _tile_release();
}
#endif

/* The panels of a chunk. A panel is read from memory while the rows of the one before it compute. */
static void integer_chunk(const product_task *t, int begin, int end) {
    const gr_matrix *m = t->m;
    const int64_t inputs = m->inputs, bytes = GROUP_BYTES * (1 + num_groups(inputs)), stride = integers_size(inputs);
    const int tiles = (t->rows + INTEGER_ROWS - 1) / INTEGER_ROWS;
    const char *panel = (const char *)m->panels + begin / PANEL * bytes;
#if TILE_INPUTS
    if (inputs % TILE_BYTE_INPUTS == 0) {
        tile_integers(t, begin, end);
        return;
    }
#endif
    for (int first = begin; first < end; first += PANEL, panel += bytes)
        for (int tile = 0, row = 0, rows; tile < tiles; tile++, row += rows) {
            vf total[INTEGER_ROWS][PANEL_VECTORS];
            const char *ahead = panel + bytes + bytes * tile / tiles;
            const float *x = t->integers + row * stride;
            rows = (t->rows - row + tiles - tile - 1) / (tiles - tile);
            if (rows == 1) add_groups(1, panel, inputs, x, ahead, GROUP_BYTES / tiles, total);
            if (rows == 2) add_groups(2, panel, inputs, x, ahead, GROUP_BYTES / tiles, total);
            if (rows == 3) add_groups(3, panel, inputs, x, ahead, GROUP_BYTES / tiles, total);
            for (int r = 0; r < rows; r++) put(m, total[r], t->y + (row + r) * t->y_stride, first, t->add);
        }
}
