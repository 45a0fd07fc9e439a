// Ranks and best items of queries over a catalogue, in one pass: scores are compared where they are computed and never
// stored.
//
//     for each panel of kPanel items                     transposed once, in the first cache
//       for each tile of kRows queries                   scores of the tile on the stack
//         for each query:  how many scores are before its target's    += compared vectors
//                          is one above its k-th best so far?         rare: a candidate, pruned to k when there are 2k
//
// A score is one chain of fused multiply-adds in the order of the width (simd.h), so it does not depend on the other
// queries, on the items next to it or on the threads. Ties: the lower position first.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "share.h"
#include "simd.h"

using namespace nestpipe;

extern "C" {

struct nestpipe_scan {
  const float* queries;         // [num_queries, width]
  const float* items;           // [num_items, width]: positions first .. first + num_items - 1 of the catalogue
  const int64_t* targets;       // [num_queries] positions in the catalogue; null: no ranks
  const float* target_scores;   // [num_queries]
  const int64_t* seen_offsets;  // [num_queries + 1]; null: nothing is left out
  const int64_t* seen;          // positions in the catalogue, in any order, repeated or outside of this part
  int64_t num_queries, num_items, width, first, k, num_threads;
  int64_t* before;      // [num_queries] items that rank before the target
  int64_t* positions;   // [num_queries, k], best first; -1 where there are fewer
  float* scores;        // [num_queries, k]; -inf where there are fewer
  uint8_t* not_finite;  // [num_queries] whether a score is infinite or not a number
};

}  // extern "C"

namespace {

constexpr int64_t kQueryFloats = 1 << 16;  // queries that stay in the second cache while panels pass

// An item of the part as one number: better ones are smaller. Of equal scores, the lower position is smaller.
uint64_t key_of(float score, int64_t place) {
  const float value = score + 0.0f;  // -0 and 0 are equal scores
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;  // descends as scores ascend
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint64_t>(place);
}

int64_t place_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffff); }

float score_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

// The k best of the items offered so far, which come in ascending positions.
struct Best {
  std::vector<uint64_t> keys;
  float threshold = -std::numeric_limits<float>::infinity();  // the score that a later item must exceed

  void offer(float score, int64_t place, int64_t k) {
    keys.push_back(key_of(score, place));
    if (static_cast<int64_t>(keys.size()) < 2 * k) return;
    std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end());
    keys.resize(k);
    threshold = score_of(keys[k - 1]);
  }
};

// One bit for each lane that is set.
inline uint32_t bits_of(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kWidth; ++lane) bits |= static_cast<uint32_t>(mask[lane] != 0) << lane;
  return bits;
#endif
}

// Scores [rows <= kRows, kPanel] of queries and a panel.
inline void score(const float* queries, int64_t rows, const float* panel, int64_t width, float* scores) {
  product(rows, kPanel, width, Left{queries, width, 1}, Right{panel, kPanel, 0}, scores, kPanel, false);
}

struct Query {
  Best best;
  std::vector<int64_t> seen;  // sorted, distinct, in this part
  Ints before{};              // per lane, subtracted: comparisons give -1
  Ints not_finite{};

  bool has_seen(int64_t position) const { return std::binary_search(seen.begin(), seen.end(), position); }
};

class Scan {
 public:
  explicit Scan(const nestpipe_scan& call) : call_(call), panel_(round_up(call.width, kWidth) * kPanel) {}

  void run(int64_t begin, int64_t end) {
    const int64_t step = std::max(kQueryFloats / std::max<int64_t>(call_.width, 1) / kRows, INT64_C(4)) * kRows;
    for (; begin < end; begin += step) block(begin, std::min(begin + step, end));
  }

 private:
  void block(int64_t begin, int64_t end) {
    queries_.assign(end - begin, Query{});
    for (int64_t query = begin; query < end; ++query) take_seen(query, queries_[query - begin]);
    for (int64_t item = 0; item < call_.num_items; item += kPanel) {
      const int64_t n = std::min(kPanel, call_.num_items - item);
      make_panel(call_.items + item * call_.width, call_.width, n, call_.width, panel_.data());
      for (int64_t query = begin; query < end; query += kRows) {
        const int64_t rows = std::min(kRows, end - query);
        alignas(64) float scores[kRows * kPanel];
        score(call_.queries + query * call_.width, rows, panel_.data(), call_.width, scores);
        for (int64_t row = 0; row < rows; ++row)
          compare(query + row, queries_[query + row - begin], scores + row * kPanel, call_.first + item, n);
      }
    }
    for (int64_t query = begin; query < end; ++query) finish(query, queries_[query - begin]);
  }

  void take_seen(int64_t query, Query& state) const {
    if (call_.seen_offsets == nullptr) return;
    for (int64_t i = call_.seen_offsets[query]; i < call_.seen_offsets[query + 1]; ++i)
      if (call_.seen[i] >= call_.first && call_.seen[i] < call_.first + call_.num_items) state.seen.push_back(call_.seen[i]);
    std::sort(state.seen.begin(), state.seen.end());
    state.seen.erase(std::unique(state.seen.begin(), state.seen.end()), state.seen.end());
  }

  void compare(int64_t query, Query& state, float* scores, int64_t position, int64_t n) const {
    Floats low = load(scores), high = load(scores + kWidth);
    state.not_finite |= (Ints)(low - low) | (Ints)(high - high);
    if (n < kPanel) {
      for (int64_t i = n; i < kPanel; ++i) scores[i] = -std::numeric_limits<float>::infinity();
      low = load(scores), high = load(scores + kWidth);
    }
    if (call_.targets != nullptr) {
      const int64_t target = call_.targets[query];
      const Floats own = splat(call_.target_scores[query]);
      if (position > target) {
        state.before += (low > own) + (high > own);
      } else if (position + n <= target) {
        state.before += (low >= own) + (high >= own);
      } else {
        for (int64_t i = 0; i < n; ++i)
          state.before[0] -= is_before(scores[i], position + i, call_.target_scores[query], target);
      }
    }
    const Floats threshold = splat(state.best.threshold);
    uint32_t better = bits_of(low > threshold) | bits_of(high > threshold) << kWidth;
    for (; better != 0; better &= better - 1) {
      const int64_t i = __builtin_ctz(better);
      if (scores[i] > state.best.threshold && !state.has_seen(position + i))
        state.best.offer(scores[i], position + i - call_.first, call_.k);
    }
  }

  static bool is_before(float score, int64_t position, float target_score, int64_t target) {
    return score > target_score || (score == target_score && position < target);
  }

  void finish(int64_t query, Query& state) {
    bool is_bad = false;
    int64_t before = 0;
    for (int lane = 0; lane < kWidth; ++lane) {
      before -= state.before[lane];
      is_bad |= state.not_finite[lane] != 0;
    }
    call_.not_finite[query] = is_bad;
    if (call_.targets != nullptr) call_.before[query] = before - num_seen_before(query, state);
    std::vector<uint64_t>& keys = state.best.keys;
    std::sort(keys.begin(), keys.end());
    for (int64_t place = 0; place < call_.k; ++place) {
      const bool exists = place < static_cast<int64_t>(keys.size());
      call_.positions[query * call_.k + place] = exists ? call_.first + place_of(keys[place]) : -1;
      call_.scores[query * call_.k + place] = exists ? score_of(keys[place]) : -std::numeric_limits<float>::infinity();
    }
  }

  int64_t num_seen_before(int64_t query, const Query& state) {
    const float* own = call_.queries + query * call_.width;
    const int64_t num_seen = static_cast<int64_t>(state.seen.size());
    rows_.resize(kPanel * call_.width);
    int64_t num_before = 0;
    for (int64_t at = 0; at < num_seen; at += kPanel) {
      const int64_t n = std::min(kPanel, num_seen - at);
      for (int64_t i = 0; i < n; ++i)
        std::copy_n(call_.items + (state.seen[at + i] - call_.first) * call_.width, call_.width, &rows_[i * call_.width]);
      make_panel(rows_.data(), call_.width, n, call_.width, panel_.data());
      alignas(64) float scores[kRows * kPanel];
      score(own, 1, panel_.data(), call_.width, scores);
      for (int64_t i = 0; i < n; ++i)
        num_before += is_before(scores[i], state.seen[at + i], call_.target_scores[query], call_.targets[query]);
    }
    return num_before;
  }

  const nestpipe_scan& call_;
  std::vector<float> panel_, rows_;
  std::vector<Query> queries_;
};

}  // namespace

extern "C" {

// Fills the results; returns 0, or -1 if memory ran out. A part has fewer than 2^32 items.
int64_t nestpipe_catalogue_scan(const nestpipe_scan* call) {
  std::vector<uint8_t> failed(1, 0);
  share(call->num_queries, call->num_threads, 4 * kRows, [&](int64_t begin, int64_t end) {
    try {
      Scan(*call).run(begin, end);
    } catch (const std::bad_alloc&) {
      __atomic_store_n(failed.data(), 1, __ATOMIC_RELAXED);
    }
  });
  return failed[0] ? -1 : 0;
}

// scores[i] = query i · item places[i], bitwise as the scan computes it.
void nestpipe_catalogue_scores(const float* queries, const float* items, const int64_t* places, int64_t num_queries,
                               int64_t width, float* scores) {
  for (int64_t query = 0; query < num_queries; ++query) {
    const float* left = queries + query * width;
    const float* right = items + places[query] * width;
    Floats sum{};
    for (int64_t i = 0; i < width; ++i) sum = fma(splat(left[i]), splat(right[i]), sum);
    scores[query] = sum[0];
  }
}

}  // extern "C"
