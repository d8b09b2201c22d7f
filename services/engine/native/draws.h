/* Noise of counters, and draws with it: the token whose logit plus noise is the largest (Gumbel-max). */

#define PHILOX_GROUPS 64
#define DRAW_TOKENS (4 * PHILOX_GROUPS)

typedef uint32_t words[DRAW_TOKENS];

/* The output words of Philox4x32-10 with key `seed` and counters [group[i], position, c2, c3] of `count` groups. */
INLINE void philox(uint64_t seed, const int64_t *group, int64_t count, uint32_t position, uint32_t c2, uint32_t c3,
                   words out) {
    uint32_t a[PHILOX_GROUPS], b[PHILOX_GROUPS], c[PHILOX_GROUPS], d[PHILOX_GROUPS];
    for (int64_t i = 0; i < PHILOX_GROUPS; i++)
        a[i] = (uint32_t)(i < count ? group[i] : 0), b[i] = position, c[i] = c2, d[i] = c3;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int64_t i = 0; i < PHILOX_GROUPS; i++) {
            uint64_t low = (uint64_t)a[i] * 0xD2511F53u, high = (uint64_t)c[i] * 0xCD9E8D57u;
            a[i] = (uint32_t)(high >> 32) ^ b[i] ^ k0, b[i] = (uint32_t)high;
            c[i] = (uint32_t)(low >> 32) ^ d[i] ^ k1, d[i] = (uint32_t)low;
        }
    for (int64_t i = 0; i < PHILOX_GROUPS; i++)
        out[4 * i] = a[i], out[4 * i + 1] = b[i], out[4 * i + 2] = c[i], out[4 * i + 3] = d[i];
}

/* out[row][4 groups]: minus the uniform (word + 0.5) / 2^32 of each output word, at position start + row. */
EXPORT void gr_philox(uint64_t seed, const int64_t *group, int64_t groups, int64_t start, int64_t rows, uint32_t c2,
                      uint32_t c3, double *out) {
    words word;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < groups; at += PHILOX_GROUPS) {
            int64_t count = groups - at < PHILOX_GROUPS ? groups - at : PHILOX_GROUPS;
            philox(seed, group + at, count, (uint32_t)(start + row), c2, c3, word);
            double *to = out + 4 * (row * groups + at);
            for (int64_t i = 0; i < 4 * count; i++) to[i] = ((double)word[i] + 0.5) * -0x1p-32;
        }
}

/* The logarithm of normal numbers above 0, to about 1e-7, after Cephes. */
INLINE vf vector_log(vf x) {
    vi bits = (vi)x - 0x3f3504f3; /* the mantissa lies between the roots of 1/2 and 2 */
    vf n = __builtin_convertvector(bits >> 23, vf), m = (vf)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    vf y = splat(7.0376836292e-2f);
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * m * m - n * 2.12194440e-4f - 0.5f * m * m;
    return m + y + n * 0.693359375f;
}

/* Words plus a half as float32, over 2^32; both halves of a word are exact. */
INLINE vf uniform(vu word) {
    vf high = __builtin_convertvector((vi)(word >> 16), vf), low = __builtin_convertvector((vi)(word & 0xffff), vf);
    return (high * 65536.0f + (low + 0.5f)) * 0x1p-32f;
}

/* -log(-log(1 - u)) for u = (word + 0.5) / 2^32, to 5e-5. Small u, which win draws, are not rounded to 1 - u = 1. */
INLINE vf gumbel(vu word) {
    vf u = uniform(word), small = u * (1.0f + u * (0.5f + u * 0.33333333f));
    return -vector_log(blend((vi)(word < (1u << 24)), small, -vector_log(uniform(~word))));
}

/* The same in float64, for the `token` of a vocabulary. */
static double exact_gumbel(uint64_t seed, int64_t token, uint32_t position, uint32_t c2, uint32_t c3) {
    int64_t group = token / 4;
    words word;
    philox(seed, &group, 1, position, c2, c3, word);
    return -log(-log1p(((double)word[token % 4] + 0.5) * -0x1p-32));
}

/* Adds the noise of `count` tokens, at most DRAW_TOKENS, from token `at` on to their logits. */
INLINE void add_gumbel(uint64_t seed, uint32_t c2, uint32_t c3, uint32_t position, int64_t at, int64_t count,
                       const float *logits, float *scores) {
    int64_t group[PHILOX_GROUPS], i = 0;
    float noise[DRAW_TOKENS];
    words word;
    for (int64_t j = 0; j < PHILOX_GROUPS; j++) group[j] = at / 4 + j;
    philox(seed, group, PHILOX_GROUPS, position, c2, c3, word);
    for (int64_t j = 0; j < DRAW_TOKENS; j += LANES) store(noise + j, gumbel(*(const vu *)(word + j)));
    for (; i + LANES <= count; i += LANES) store(scores + i, load(logits + i) + load(noise + i));
    for (; i < count; i++) scores[i] = logits[i] + noise[i];
}

/* The largest of `size` scores, NaN if one is no number. */
static float largest_of(const float *scores, int64_t size) {
    vf most = splat(-INFINITY), broken = splat(0);
    float largest = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf part = load(scores + i);
        most = blend(part > most, part, most), broken = blend(part == part, broken, part);
    }
    for (int j = 0; j < LANES; j++) largest = most[j] > largest ? most[j] : largest;
    float sum = sum_of(broken);
    for (; i < size; i++) largest = scores[i] > largest ? scores[i] : largest, sum += scores[i] == scores[i] ? 0 : NAN;
    return largest + sum;
}

/* Of each row the token with the largest sum of logit and noise in float64, the lower one among equals; -1 if the
 * largest is infinite or a logit is no number. `scores` [rows, size] gets the sums in float32, to 1e-4. */
EXPORT void gr_draw(uint64_t seed, uint32_t c2, uint32_t c3, const int64_t *position, const float *logits, int64_t rows,
                    int64_t size, float *scores, int64_t *token) {
    for (int64_t row = 0; row < rows; row++, logits += size, scores += size) {
        uint32_t place = (uint32_t)position[row];
        for (int64_t at = 0; at < size; at += DRAW_TOKENS)
            add_gumbel(seed, c2, c3, place, at, size - at < DRAW_TOKENS ? size - at : DRAW_TOKENS, logits + at,
                       scores + at);
        float largest = largest_of(scores, size);
        token[row] = -1;
        if (!isfinite(largest)) continue;
        /* Less twice the error of a sum: no other token can have the largest one. */
        float least = largest - 2e-4f - 1e-6f * (fabsf(largest) + 32.0f);
        double best = -INFINITY;
        for (int64_t from = 0; from < size; from += DRAW_TOKENS) {
            int64_t to = from + DRAW_TOKENS < size ? from + DRAW_TOKENS : size;
            int has_any = 0;
            for (int64_t at = from; at < to; at++) has_any |= scores[at] >= least;
            for (int64_t at = from; has_any && at < to; at++) {
                if (scores[at] < least) continue;
                double exact = (double)logits[at] + exact_gumbel(seed, at, place, c2, c3);
                if (exact > best) best = exact, token[row] = at;
            }
        }
    }
}
