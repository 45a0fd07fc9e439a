// Transposed tiles of scores, keys by candidates, for prefix_hit.cpp: silu is applied while they are in registers.

#pragma once

#include "simd.h"

namespace nestpipe {

constexpr int64_t kKeyTile = 96;    // keys and candidates of a tile of scores: it stays in the first-level cache
constexpr int64_t kQueryTile = 64;
constexpr int kTall = kWidth == 16 ? 12 : 6;  // rows of sums in registers, of which AVX-512 has twice as many
constexpr int64_t kPadding = 16;    // floats to which rows of weights are padded, for every kWidth

// 1 / x for x in [1, 1e38], with a relative error of about 2e-7.
inline Floats inverse(Floats x) {
#if defined(__AVX512F__)
  const Floats guess = _mm512_rcp14_ps(x);
#elif defined(__AVX2__)
  const Floats guess = _mm256_rcp_ps(x);
#else
  return 1.0f / x;
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
  return guess * fma(-x, guess, splat(2.0f));
#endif
}

// The lanes added pairwise where instructions do that, faster than `sum`.
inline float sum_pairs(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(value);
#elif defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  return sum(value);
#endif
}

// Reads some floats into the second-level cache ahead of their use; addresses behind the end of an array do no harm.
inline void prefetch(const float* from, int64_t count) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(from) & ~uintptr_t{63}, end = reinterpret_cast<uintptr_t>(from + count);
  for (uintptr_t line = first; line < end; line += 64) __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 2);
}

// to[keys] = K · q + bias
inline void dots(int64_t num_keys, int64_t depth, const float* k, int64_t k_row, const float* q, const float* bias, float* to) {
  for (int64_t j = 0; j < num_keys; ++j, k += k_row) {
    Floats sums{};
    int64_t i = 0;
    for (; i + kWidth <= depth; i += kWidth) sums = fma(load(q + i), load(k + i), sums);
    float dot = sum_pairs(sums);
    for (; i < depth; ++i) dot += q[i] * k[i];
    to[j] = dot + (bias == nullptr ? 0.0f : bias[j]);
  }
}

inline Floats silu(Floats x) { return x * inverse(exp_minus(x) + 1.0f); }

// to[R keys, V vectors of candidates] = silu(K · Q' + bias), transposed scores.
template <int R, int V>
inline void score_tile(int64_t depth, const float* k, int64_t k_row, const float* q, const float* bias, float* to) {
  Floats sums[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sums[r][v] = bias == nullptr ? Floats{} : splat(bias[r]);
  for (int64_t i = 0; i < depth; ++i) {
    Floats right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = load(q + i * kPanel + v * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Floats left = splat(k[r * k_row + i]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store(to + r * kQueryTile + v * kWidth, silu(sums[r][v]));
}

template <int R>
inline void score_rows(int64_t width, int64_t depth, int64_t panel, const float* k, int64_t k_row, const float* q,
                       const float* bias, float* to) {
  for (; width >= kPanel; width -= kPanel, q += panel, to += kPanel) score_tile<R, 2>(depth, k, k_row, q, bias, to);
  if (width > 0) score_tile<R, 1>(depth, k, k_row, q, bias, to);
}

inline void scores_of(int64_t rows, int64_t width, int64_t depth, int64_t panel, const float* k, int64_t k_row,
                      const float* q, const float* bias, float* to) {
  switch (rows) {
    case 1: return score_rows<1>(width, depth, panel, k, k_row, q, bias, to);
    case 2: return score_rows<2>(width, depth, panel, k, k_row, q, bias, to);
    case 3: return score_rows<3>(width, depth, panel, k, k_row, q, bias, to);
    case 4: return score_rows<4>(width, depth, panel, k, k_row, q, bias, to);
    case 5: return score_rows<5>(width, depth, panel, k, k_row, q, bias, to);
    default: return score_rows<6>(width, depth, panel, k, k_row, q, bias, to);
  }
}

}  // namespace nestpipe
