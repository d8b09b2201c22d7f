/* Products of bfloat16 inputs and weights (AVX512-BF16 without AMX, see tiles.h), a part of kernel.c.
 *
 * For models whose dtype is bfloat16: inputs are rounded to it, as on GPUs. An instruction adds the products of two
 * inputs for LANES outputs to float32 sums, so that rows cost half of what they do in float32.
 *
 * Weights lie in panels as those of float32 do, with a pair of weights, those of two inputs, in place of each number;
 * rows become pairs of inputs. The last pair is filled up with zeros. Numbers below 2^-126 count as zero.
 */
static int64_t num_pairs(int64_t inputs) { return (inputs + 1) / 2; }

/* Writes the pairs of rows, num_pairs() for each. */
static void to_pairs(int rows, int64_t inputs, const float *x, int64_t x_stride, float *pairs) {
    for (int r = 0; r < rows; r++, x += x_stride, pairs += num_pairs(inputs))
        for (int64_t k = 0; k < inputs; k += LANES) {
            int64_t left = inputs - k < LANES ? inputs - k : LANES;
            __mmask16 mask = (__mmask16)((1u << (left + (left & 1))) - 1);
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)some_inputs(x + k, left));
            _mm256_mask_storeu_epi16(pairs + k / 2, mask, rounded);
        }
}

/* As _mm512_dpbf16_ps, for which GCC 12 keeps the sums in memory. */
INLINE void add_pairs(vf *sum, vf inputs, vf weights) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(*sum) : "v"(inputs), "v"(weights));
}
