// Vectors of floats, and the few functions on them that kernels need: fused multiply-add, exp, log, and a small sgemm.
//
// Results do not depend on vector remainders: there is no scalar tail, and an element of a product is one chain of fused
// multiply-adds in the order of k, for any block size.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace nestpipe {

#ifdef __AVX512F__
constexpr int kWidth = 16;
#else
constexpr int kWidth = 8;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Floats splat(float value) { return value - Floats{}; }

// The compiler must not fuse (see the flags in native_library.py), so that results are bitwise identical everywhere.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The second where one is not a number. Compilers do not see one instruction in the comparison.
#if defined(__AVX512F__)
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
#elif defined(__AVX2__)
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
#else
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }
#endif

// Whether kWidth bytes are all the same.
inline bool alike(const uint8_t* bytes) {
  uint64_t words[kWidth / 8], differ = 0;
  std::memcpy(words, bytes, sizeof words);
  for (uint64_t word : words) differ |= word ^ bytes[0] * UINT64_C(0x0101010101010101);
  return differ == 0;
}

// table[index] for kWidth bytes; fast if all are equal, as they often are.
inline Floats gather(const float* table, const uint8_t* index) {
  if (alike(index)) return splat(table[index[0]]);
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
  return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), table, 4);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(index));
  return _mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(bytes), 4);
#else
  Floats found;
  for (int lane = 0; lane < kWidth; ++lane) found[lane] = table[index[lane]];
  return found;
#endif
}

// The lanes below `count`; others are zero.
inline Ints lanes_below(int64_t count) {
  Ints lane;
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  const int32_t limit = static_cast<int32_t>(count < kWidth ? count : kWidth);
  return lane < (Ints{} + limit);
}

inline Floats keep(Floats value, Ints mask) { return (Floats)((Ints)value & mask); }

// e^x with a relative error of about 2e-7; beyond +-87 it stays at the value there.
inline Floats exp(Floats x) {
  x = max(min(x, splat(87.0f)), splat(-87.0f));
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits
  const Floats shifted = fma(x, splat(1.44269504088896341f), magic);
  const Floats n = shifted - magic;
  Floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// e^-x for 1 / (1 + e^-x): a relative error of about 1e-7 times max(1, |x|), which that sum hides; cheaper than exp.
inline Floats exp_minus(Floats x) {
  x = max(min(x, splat(87.0f)), splat(-87.0f));
  const Floats magic = splat(12582912.0f), log2_e = splat(-1.44269504088896341f);
  const Floats shifted = fma(x, log2_e, magic);
  const Floats r = fma(x, log2_e, magic - shifted);  // 2^r with |r| <= 1/2
  Floats p = splat(1.3264727313e-3f);
  p = fma(p, r, splat(9.6715129912e-3f));
  p = fma(p, r, splat(5.5507335812e-2f));
  p = fma(p, r, splat(2.4022242427e-1f));
  p = fma(p, r, splat(6.9314700365e-1f));
  p = fma(p, r, splat(1.0f));
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

// ln x for normal x > 0, with an absolute error of about 1e-7 times the result.
inline Floats log(Floats x) {
  Ints bits = (Ints)x;
  const Ints offset = (bits - 0x3f3504f3) >> 23;  // mantissa in [sqrt(1/2), sqrt(2))
  bits -= offset << 23;
  const Floats e = __builtin_convertvector(offset, Floats);
  const Floats r = (Floats)bits - 1.0f;
  const Floats square = r * r;
  Floats p = splat(7.0376836292e-2f);
  p = fma(p, r, splat(-1.1514610310e-1f));
  p = fma(p, r, splat(1.1676998740e-1f));
  p = fma(p, r, splat(-1.2420140846e-1f));
  p = fma(p, r, splat(1.4249322787e-1f));
  p = fma(p, r, splat(-1.6668057665e-1f));
  p = fma(p, r, splat(2.0000714765e-1f));
  p = fma(p, r, splat(-2.4999993993e-1f));
  p = fma(p, r, splat(3.3333331174e-1f));
  p = p * r * square;
  p = fma(e, splat(-2.12194440e-4f), p);
  p = fma(square, splat(-0.5f), p);
  return fma(e, splat(0.693359375f), r + p);
}

// The lanes added in a fixed order.
inline float sum(Floats value) {
  float total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += value[lane];
  return total;
}

// One operand of a product: element (m, k) is at data[m * row + k * step].
struct Left {
  const float* data;
  int64_t row;
  int64_t step;
};

// The other: kPanel columns of row k are at data[k * row], the next ones `panel` floats further.
struct Right {
  const float* data;
  int64_t row;
  int64_t panel;
};

constexpr int64_t kPanel = 2 * kWidth;

// C[R rows, V vectors] (+)= A · B; rows of C are ldc apart.
template <int R, int V>
inline void product_tile(int64_t depth, Left a, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  Floats sums[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[r][v] = add ? load(c + r * ldc + v * kWidth) : Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = load(b + k * ldb + v * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Floats left = splat(a.data[r * a.row + k * a.step]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(c + r * ldc + v * kWidth, sums[r][v]);
}

template <int R>
inline void product_rows(int64_t width, int64_t depth, Left a, Right b, float* c, int64_t ldc, bool add) {
  for (; width >= kPanel; width -= kPanel, b.data += b.panel, c += kPanel)
    product_tile<R, 2>(depth, a, b.data, b.row, c, ldc, add);
  if (width > 0) product_tile<R, 1>(depth, a, b.data, b.row, c, ldc, add);
}

constexpr int64_t kRows = 6;  // 6 x 2 vectors of sums, 2 of B and 1 of A fit into 16 registers

// C[rows <= kRows, width] (+)= A[rows, depth] · B[depth, width]; the width is a multiple of kWidth.
inline void product(int64_t rows, int64_t width, int64_t depth, Left a, Right b, float* c, int64_t ldc, bool add) {
  switch (rows) {
    case 1: return product_rows<1>(width, depth, a, b, c, ldc, add);
    case 2: return product_rows<2>(width, depth, a, b, c, ldc, add);
    case 3: return product_rows<3>(width, depth, a, b, c, ldc, add);
    case 4: return product_rows<4>(width, depth, a, b, c, ldc, add);
    case 5: return product_rows<5>(width, depth, a, b, c, ldc, add);
    default: return product_rows<6>(width, depth, a, b, c, ldc, add);
  }
}

#ifdef __AVX2__
// to[8, 8] = the transpose of from[rows <= 8, columns <= 8]; what is missing is zero.
inline void transpose(const float* from, int64_t row, int64_t rows, int64_t columns, float* to, int64_t to_row) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(columns)), lane);
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = i < rows ? _mm256_maskload_ps(from + i * row, mask) : _mm256_setzero_ps();
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_row, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
#endif

// to[column * kPanel + i] = from[i * row + column]: a panel of B from n <= kPanel rows, the others are zero. It has room
// for whole vectors of columns.
inline void make_panel(const float* from, int64_t row, int64_t n, int64_t width, float* to) {
#ifdef __AVX2__
  for (int64_t i = 0; i < kPanel; i += 8)
    for (int64_t column = 0; column < width; column += 8)
      transpose(from + i * row + column, row, n - i, width - column, to + column * kPanel + i, kPanel);
#else
  for (int64_t column = 0; column < width; ++column)
    for (int64_t i = 0; i < kPanel; ++i) to[column * kPanel + i] = i < n ? from[i * row + column] : 0.0f;
#endif
}

}  // namespace nestpipe
