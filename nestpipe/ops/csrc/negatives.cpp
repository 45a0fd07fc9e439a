// Sampled softmax of one positive among negatives, loss and gradients in one pass, as defined in ops/negatives.py.
//
// Negatives come in blocks of R rows; a block is scored for its receivers, one token or several. A block's rows are read
// once: while they are in cache, each receiver scores them, updates its running maximum and adds them, weighted, to the
// gradient of its query. The weights are kept until the receivers' sums are complete; then a row's gradient is the weighted
// sum of its receivers' queries. So a segment stores one number for each (token, negative), never a vector.
//
//   unit      tokens that share blocks, and those blocks: what one thread scores
//   segment   whole units of at least so many tokens: what is kept at a time
//
// Determinism: a token's loss and gradient depend on its unit alone. A row's gradient is summed over (block, place in the
// block), ascending, for any segment size; then over the tokens whose positive it is. Threads divide units in the first pass
// and columns in the second, so results do not depend on their number.

#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "share.h"
#include "simd.h"

extern "C" {

struct nestpipe_negatives {
  const float* queries;        // [T, stride]; the stride is whole cache lines, zero beyond the width
  const float* rows;           // [U, stride]
  const float* positive_rows;  // [U, stride], may be the same
  const int64_t* positives;    // [T] places in positive_rows; a negative at the same place is left out
  const int64_t* negatives;    // [G, R] places in rows
  const int64_t* receiver_offsets;  // [G + 1]
  const int64_t* receivers;         // tokens for which each block is scored, ascending
  const int64_t* unit_tokens;       // [N + 1]
  const int64_t* unit_blocks;       // [N + 1]
  int64_t num_tokens, num_rows, num_blocks, num_negatives, num_units;
  int64_t stride, width;  // floats from row to row, and those that count
  int64_t segment;        // tokens
  int64_t num_threads;
  float* d_queries;        // [T, stride]
  float* d_rows;           // [U, stride], zero at first
  float* d_positive_rows;  // [U, stride], zero at first, may be the same
  double* losses;          // [T]
};

}  // extern "C"

namespace {

using namespace nestpipe;

constexpr int64_t kAtOnce = 64;     // rows of a block that are scored before their weighted sum: they fit into the L1 cache
constexpr int64_t kLine = 16;       // floats in a cache line
constexpr int64_t kAhead = 8;       // prefetch distance of the second pass, in rows
constexpr int64_t kMinTokens = 16;  // fewer are not worth a thread
constexpr float kLeftOut = -FLT_MAX;

// Lanes of a and b in groups of 2S, each folded to S: those of a, then those of b.
template <int S>
inline Floats fold(Floats a, Floats b) {
#if defined(__clang__)
  Floats total;
  for (int lane = 0; lane < kWidth; ++lane) {
    const int at = lane / (2 * S) * (2 * S) + lane % S;
    total[lane] = lane / S % 2 ? b[at] + b[at + S] : a[at] + a[at + S];
  }
  return total;
#else
  Ints low;
#pragma GCC unroll 16
  for (int lane = 0; lane < kWidth; ++lane) low[lane] = lane / (2 * S) * (2 * S) + lane % S + lane / S % 2 * kWidth;
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + S);
#endif
}

// The sums of kWidth vectors, one in each lane.
template <int S = kWidth / 2>
inline Floats sums_of(Floats* parts) {
#pragma GCC unroll 8
  for (int i = 0; i < S; ++i) parts[i] = fold<S>(parts[i], parts[i + S]);
  if constexpr (S > 1) return sums_of<S / 2>(parts);
  return parts[0];
}

// Calls work(column, number of vectors as a constant) for strips of columns that fit into registers.
template <int kMost = 8, typename Work>
inline void by_strips(int64_t begin, int64_t end, const Work& work) {
  for (; begin + kMost * kWidth <= end; begin += kMost * kWidth) work(begin, std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) {
    if (begin < end) by_strips<kMost - 1>(begin, end, work);
  }
}

inline float exp_of(float x) { return exp(splat(x))[0]; }

// The running state of a token: its largest score, the sum of exp(score - largest) over negatives, and the positive's score.
struct Running {
  float largest, positive;
  double total;
};

// One segment: the weights of its pairs (block, receiver), [R padded] each, and what turns them into probabilities.
class Segment {
 public:
  Segment(const nestpipe_negatives& call)
      : call_(call), padded_(round_up(call.num_negatives, kWidth)), num_steps_((padded_ + kAtOnce - 1) / kAtOnce) {}

  void resize(int64_t first_unit, int64_t last_unit) {
    first_pair_ = call_.receiver_offsets[call_.unit_blocks[first_unit]];
    const int64_t num_pairs = call_.receiver_offsets[call_.unit_blocks[last_unit]] - first_pair_;
    weights_.resize(std::max<size_t>(weights_.size(), num_pairs * padded_));
    factors_.resize(std::max<size_t>(factors_.size(), num_pairs * num_steps_));
  }

  // Scores the blocks of a unit; leaves the losses, the queries' gradients and the weights.
  void score(int64_t unit, Running* running, float* coefficients) {
    for (int64_t token = call_.unit_tokens[unit]; token < call_.unit_tokens[unit + 1]; ++token) begin(token, running[token]);
    for (int64_t block = call_.unit_blocks[unit]; block < call_.unit_blocks[unit + 1]; ++block) score_block(block, running);
    for (int64_t token = call_.unit_tokens[unit]; token < call_.unit_tokens[unit + 1]; ++token)
      end(token, running[token], coefficients[token]);
    for (int64_t block = call_.unit_blocks[unit]; block < call_.unit_blocks[unit + 1]; ++block) {
      for (int64_t at = call_.receiver_offsets[block]; at < call_.receiver_offsets[block + 1]; ++at) {
        const Running& own = running[call_.receivers[at]];
        float* factors = factors_.data() + (at - first_pair_) * num_steps_;
        for (int64_t step = 0; step < num_steps_; ++step)
          factors[step] = static_cast<float>(exp_of(factors[step] - own.largest) / own.total);
      }
    }
  }

  // Adds some columns of the row gradients of a block's negatives.
  void add_rows(int64_t block, int64_t first_column, int64_t last_column) const {
    const int64_t* places = call_.negatives + block * call_.num_negatives;
    const int64_t last = (call_.num_blocks - block) * call_.num_negatives - 1;
    const int64_t begin = call_.receiver_offsets[block], end = call_.receiver_offsets[block + 1];
    for (int64_t r = 0; r < call_.num_negatives; ++r) {
      const int64_t next = std::min(r + kAhead, last);
      for (int64_t column = first_column; column < last_column; column += kLine)
        __builtin_prefetch(call_.d_rows + places[next] * call_.stride + column, 1);
      float* into = call_.d_rows + places[r] * call_.stride;
      by_strips(first_column, last_column, [&](int64_t column, auto vectors) {
        constexpr int kVectors = decltype(vectors)::value;
        Floats sums[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] = load(into + column + v * kWidth);
        for (int64_t at = begin; at < end; ++at) {
          const float* query = call_.queries + call_.receivers[at] * call_.stride + column;
          const int64_t pair = at - first_pair_;
          const Floats weight = splat(weights_[pair * padded_ + r] * factors_[pair * num_steps_ + r / kAtOnce]);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) sums[v] = fma(weight, load(query + v * kWidth), sums[v]);
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) store(into + column + v * kWidth, sums[v]);
      });
    }
  }

 private:
  void begin(int64_t token, Running& running) const {
    const float* query = call_.queries + token * call_.stride;
    const float* row = call_.positive_rows + call_.positives[token] * call_.stride;
    Floats sums{};
    for (int64_t column = 0; column < call_.width; column += kWidth)
      sums = fma(load(query + column), load(row + column), sums);
    running.positive = running.largest = sum(sums);
    running.total = 0;
    std::fill_n(call_.d_queries + token * call_.stride, call_.stride, 0.0f);
  }

  void score_block(int64_t block, Running* running) {
    const int64_t* places = call_.negatives + block * call_.num_negatives;
    const int64_t last = (call_.num_blocks - block) * call_.num_negatives - 1;
    for (int64_t step = 0; step < num_steps_; ++step) {
      const int64_t first = step * kAtOnce, size = std::min(kAtOnce, padded_ - first);
      for (int64_t i = 0; i < size; ++i) {  // the rows that come next, while these are scored
        const float* row = call_.rows + places[std::min(first + kAtOnce + i, last)] * call_.stride;
        for (int64_t column = 0; column < call_.width; column += kLine) __builtin_prefetch(row + column);
      }
      for (int64_t at = call_.receiver_offsets[block]; at < call_.receiver_offsets[block + 1]; ++at) {
        const int64_t token = call_.receivers[at], pair = at - first_pair_;
        float* weights = weights_.data() + pair * padded_ + first;
        score_rows(token, places, first, size, weights);
        factors_[pair * num_steps_ + step] = weigh(token, size, weights, running[token]);
        add_query(token, places + first, std::min(size, call_.num_negatives - first), weights);
      }
    }
  }

  // The scores of a token with rows first .. first + size - 1 of a block.
  void score_rows(int64_t token, const int64_t* places, int64_t first, int64_t size, float* scores) const {
    const float* query = call_.queries + token * call_.stride;
    const int64_t positive = call_.positives[token];
    for (int64_t i = 0; i < size; i += kWidth) {
      const float* rows[kWidth];
      Floats parts[kWidth];
#pragma GCC unroll 16
      for (int lane = 0; lane < kWidth; ++lane) {
        rows[lane] = call_.rows + places[std::min(first + i + lane, call_.num_negatives - 1)] * call_.stride;
        parts[lane] = Floats{};
      }
      for (int64_t column = 0; column < call_.width; column += kWidth) {
        const Floats part = load(query + column);
#pragma GCC unroll 16
        for (int lane = 0; lane < kWidth; ++lane) parts[lane] = fma(part, load(rows[lane] + column), parts[lane]);
      }
      store(scores + i, sums_of(parts));
    }
    const int64_t num = std::min(size, call_.num_negatives - first);
    bool hit = false;
    for (int64_t i = 0; i < num; ++i) hit |= places[first + i] == positive;
    for (int64_t i = 0; hit && i < num; ++i)
      if (places[first + i] == positive) scores[i] = kLeftOut;
    std::fill(scores + num, scores + size, kLeftOut);
  }

  // Scores become exp(score - largest), with the token's largest so far, which is returned.
  float weigh(int64_t token, int64_t size, float* scores, Running& running) const {
    Floats most = splat(running.largest);
    for (int64_t i = 0; i < size; i += kWidth) most = max(most, load(scores + i));
    float largest = most[0];
    for (int lane = 1; lane < kWidth; ++lane) largest = std::max(largest, most[lane]);
    if (largest > running.largest) {
      const float scale = exp_of(running.largest - largest);
      float* sums = call_.d_queries + token * call_.stride;
      for (int64_t column = 0; column < call_.width; column += kWidth) store(sums + column, load(sums + column) * scale);
      running.total *= scale;
      running.largest = largest;
    }
    Floats total{};
    for (int64_t i = 0; i < size; i += kWidth) {
      const Floats score = load(scores + i);
      const Floats weight = keep(exp(score - largest), score > splat(kLeftOut));
      store(scores + i, weight);
      total += weight;
    }
    running.total += sum(total);
    return largest;
  }

  void add_query(int64_t token, const int64_t* places, int64_t size, const float* weights) const {
    by_strips(0, call_.width, [&](int64_t column, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      float* into = call_.d_queries + token * call_.stride + column;
      Floats sums[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[v] = load(into + v * kWidth);
      for (int64_t i = 0; i < size; ++i) {
        const float* row = call_.rows + places[i] * call_.stride + column;
        const Floats weight = splat(weights[i]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[v] = fma(weight, load(row + v * kWidth), sums[v]);
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(into + v * kWidth, sums[v]);
    });
  }

  void end(int64_t token, Running& running, float& coefficient) const {
    const float own = exp_of(running.positive - running.largest);
    running.total += own;
    call_.losses[token] = std::log(running.total) + (static_cast<double>(running.largest) - running.positive);
    coefficient = static_cast<float>(own / running.total) - 1.0f;
    const Floats over = splat(static_cast<float>(1.0 / running.total)), weight = splat(coefficient);
    const float* row = call_.positive_rows + call_.positives[token] * call_.stride;
    float* sums = call_.d_queries + token * call_.stride;
    for (int64_t column = 0; column < call_.width; column += kWidth)
      store(sums + column, fma(weight, load(row + column), load(sums + column) * over));
  }

  const nestpipe_negatives& call_;
  const int64_t padded_, num_steps_;
  int64_t first_pair_ = 0;
  std::vector<float> weights_, factors_;
};

bool has_wrong_place(const int64_t* places, int64_t n, int64_t num_rows) {
  uint64_t largest = 0;  // a negative place is a huge number
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, static_cast<uint64_t>(places[i]));
  return n > 0 && largest >= static_cast<uint64_t>(num_rows);
}

// Runs work(first column, last column) on whole cache lines of columns, so that threads never write to the same one.
template <typename Work>
void share_columns(const nestpipe_negatives& call, const Work& work) {
  share(call.stride / kLine, call.num_threads, 1, [&](int64_t begin, int64_t end) {
    work(begin * kLine, std::min(end * kLine, call.width));
  });
}

int64_t run(const nestpipe_negatives& call) {
  if (has_wrong_place(call.negatives, call.num_blocks * call.num_negatives, call.num_rows) ||
      has_wrong_place(call.positives, call.num_tokens, call.num_rows))
    return -2;
  std::vector<Running> running(call.num_tokens);
  std::vector<float> coefficients(call.num_tokens);
  Segment segment(call);
  for (int64_t first = 0, last; first < call.num_units; first = last) {
    const int64_t token = call.unit_tokens[first];
    for (last = first + 1; last < call.num_units && call.unit_tokens[last] - token < call.segment;) ++last;
    segment.resize(first, last);
    share(call.unit_tokens[last] - token, call.num_threads, kMinTokens, [&](int64_t begin, int64_t end) {
      const int64_t* units = call.unit_tokens;
      int64_t unit = std::lower_bound(units + first, units + last, token + begin) - units;
      for (; unit < last && units[unit] < token + end; ++unit) segment.score(unit, running.data(), coefficients.data());
    });
    share_columns(call, [&](int64_t begin, int64_t end) {
      for (int64_t block = call.unit_blocks[first]; block < call.unit_blocks[last]; ++block)
        segment.add_rows(block, begin, end);
    });
  }
  share_columns(call, [&](int64_t begin, int64_t end) {
    for (int64_t token = 0; token < call.num_tokens; ++token) {
      const float* query = call.queries + token * call.stride;
      float* into = call.d_positive_rows + call.positives[token] * call.stride;
      for (int64_t column = begin; column < end; column += kWidth)
        store(into + column, fma(splat(coefficients[token]), load(query + column), load(into + column)));
    }
  });
  return 0;
}

}  // namespace

extern "C" {

// 0, -1 if memory ran out, or -2 for an invalid place; then nothing has changed.
int64_t nestpipe_negatives_run(const nestpipe_negatives* call) {
  try {
    nestpipe_negatives own = *call;
    own.width = round_up(own.width, kWidth);
    return run(own);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
