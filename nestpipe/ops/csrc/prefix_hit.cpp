// Candidates against cached KV prefixes: projections, attention and heads of a ranking model in one call.
//
//     per request   x = events (none or one) | candidates          per block   project, attend, finish; then the heads
//
// Everything that a hit needs differs from attention over a batch in three points, which make it fast:
//   - All candidates of a request have one place and one time. So a key has one bias for all of them, and the channels of
//     position and time (FuXi) are one sum over the history per request.
//   - Scores are computed transposed, keys by candidates: keys and values are read where they are cached, never packed.
//   - silu is applied while the scores are in registers.
// The score of a candidate is bitwise independent of other candidates and of other requests.

#include "attention.h"
#include "hit_tiles.h"
#include "time_buckets.h"

// The weights of a block, rows [in, out] padded to whole vectors; ops/prefix_hit_native.py has the same list.
struct HitBlock {
  const float *uvqk, *position, *time, *out, *out_bias;
  const float *ffn_gate, *ffn_up, *ffn_down;  // null unless FuXi
};

struct HitRequest {
  const float *event, *candidates;  // input vectors [events, dim] and [candidates, dim]
  const float *const *keys, *const *values;  // of each block [cached, heads, width]
  const int64_t* times;                      // [cached], null for a log without times
  int64_t num_events, num_candidates, num_cached, event_time, request_time;
  float* scores;  // [candidates, labels]
};

struct PrefixHit {
  const HitBlock* blocks;
  const HitRequest* requests;
  const float *head_up, *head_up_bias, *head_down, *head_down_bias;
  const int64_t* boundaries;
  int64_t num_blocks, num_requests, dim, num_heads, qk_width, v_width, ffn_width, head_width, num_labels;
  int64_t num_position, num_boundaries, is_channel, num_threads;
  double norm, epsilon;
};

namespace {

using namespace nestpipe;

// One thread's work on requests; its memory is kept for the next ones.
class HitWorker {
 public:
  void run(const PrefixHit& all, const HitRequest& one) {
    a = &all, r = &one;
    D = a->qk_width, V = a->v_width, H = a->num_heads, C = a->is_channel ? 3 : 1;
    Dp = round_up(D, kWidth), Vp = round_up(V, kWidth), values = H * V;
    dim = padded(a->dim), gates = C * values, projected = padded(gates + values + 2 * H * D);
    num_rows = r->num_events + r->num_candidates, history = r->num_cached + r->num_events;
    read_inputs();
    for (int64_t number = 0; number < a->num_blocks; ++number) {
      const HitBlock& block = a->blocks[number];
      const int64_t first = number + 1 == a->num_blocks ? r->num_events : 0;  // event states after the last block are never read
      project(block);
      fill_biases(block);
      attended.zeros(num_rows * padded(gates));
      attend(number, first == 0 && r->num_events);
      finish(block, first);
    }
    score();
  }

 private:
  const PrefixHit* a = nullptr;
  const HitRequest* r = nullptr;
  int64_t D = 0, V = 0, H = 0, C = 0, Dp = 0, Vp = 0;
  int64_t values = 0, dim = 0, gates = 0, projected = 0, num_rows = 0, history = 0;
  Room x, normed, own, attended, hidden, gate_rows;
  Room panels, scores, outs, flat, position, time, shared;
  Room weights, event_outs, event_position, event_shared;
  std::vector<uint8_t> buckets;

  static int64_t padded(int64_t width) { return round_up(width, kPadding); }
  bool is_timed() const { return r->times != nullptr; }
  float* row_of(int64_t row) { return own.at(row * projected); }
  const float* gate(int64_t row) { return row_of(row); }
  const float* value(int64_t row) { return row_of(row) + gates; }
  const float* query(int64_t row) { return row_of(row) + gates + values; }
  const float* key(int64_t row) { return row_of(row) + gates + values + H * D; }
  float* to(int64_t row) { return attended.at(row * padded(gates)); }

  void read_inputs() {
    x.zeros(num_rows * dim);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t other = row - r->num_events;
      std::copy_n(other < 0 ? r->event : r->candidates + other * a->dim, a->dim, x.at(row * dim));
    }
    if (!is_timed()) return;
    Buckets search(a->boundaries, a->num_boundaries);
    buckets.resize(history + 1);
    for (int64_t j = 0; j < history; ++j)
      buckets[j] = search.of(gap_of(r->request_time, j < r->num_cached ? r->times[j] : r->event_time));
  }

  // The biases of every key, in the history's order: for candidates, and the position for the event. In add mode `position`
  // and `event_position` include the time.
  void fill_biases(const HitBlock& block) {
    const bool add = !a->is_channel;
    position.reserve(history), time.reserve(history), event_position.reserve(history);
    for (int64_t j = 0; j < history; ++j) {
      const float timed = is_timed() ? block.time[buckets[j]] : 0.0f;
      *time.at(j) = timed;
      *position.at(j) = block.position[std::min(history - j, a->num_position - 1)] + (add ? timed : 0.0f);
      *event_position.at(j) =
          block.position[std::clamp<int64_t>(history - 1 - j, 0, a->num_position - 1)] + (add ? timed : 0.0f);
    }
    self_position = block.position[0];
    self_time = is_timed() ? block.time[0] : 0.0f;
  }
  float self_position = 0, self_time = 0;

  // ---- dense parts ----

  void multiply(const float* left, int64_t left_row, int64_t rows, int64_t depth, const float* weights, int64_t width,
                float* result, bool add) {
    for (int64_t row = 0; row < rows; row += kRows)
      product(std::min(kRows, rows - row), width, depth, Left{left + row * left_row, left_row, 1},
              Right{weights, width, kPanel}, result + row * width, width, add);
  }

  // Rows without mean (HSTU, heads) and with deviation 1; RMS keeps the mean. Columns behind the width become zero.
  void normalise(const float* from, int64_t rows, int64_t width, bool centred, float* result) {
    const int64_t row_width = padded(width);
    const float per = 1.0f / static_cast<float>(width);
    for (int64_t row = 0; row < rows; ++row, from += row_width, result += row_width) {
      Floats total{}, squares{};
      for (int64_t i = 0; centred && i < width; i += kWidth) total = total + load(from + i);
      const float mean = centred ? sum(total) * per : 0.0f;
      for (int64_t i = 0; i < width; i += kWidth) {
        const Floats value = keep(load(from + i) - mean, lanes_below(width - i));
        squares = fma(value, value, squares);
        store(result + i, value);
      }
      const float factor = 1.0f / std::sqrt(sum(squares) * per + static_cast<float>(a->epsilon));
      for (int64_t i = 0; i < row_width; i += kWidth)
        store(result + i, i < width ? load(result + i) * factor : Floats{});
    }
  }

  void project(const HitBlock& block) {
    normed.reserve(num_rows * dim), own.reserve(num_rows * projected);
    normalise(x.at(0), num_rows, a->dim, !a->is_channel, normed.at(0));
    multiply(normed.at(0), dim, num_rows, a->dim, block.uvqk, projected, own.at(0), false);
    for (int64_t i = 0; i < num_rows * projected; i += kWidth) store(own.at(i), silu(load(own.at(i))));
  }

  // x += W_o (gate · norm(attended)) + b_o, then SwiGLU if the model has it; from row `first` on.
  void finish(const HitBlock& block, int64_t first) {
    const int64_t rows = num_rows - first, width = padded(gates);
    hidden.reserve(num_rows * width);
    normalise(to(first), rows, gates, !a->is_channel, hidden.at(0));
    for (int64_t row = 0; row < rows; ++row) {
      float* mixed = hidden.at(row * width);
      const float* opened = gate(first + row);
      for (int64_t i = 0; i < gates; ++i) mixed[i] *= opened[i];
      float* sums = x.at((first + row) * dim);
      for (int64_t i = 0; i < dim; ++i) sums[i] += block.out_bias[i];
    }
    multiply(hidden.at(0), width, rows, gates, block.out, dim, x.at(first * dim), true);
    if (block.ffn_gate == nullptr) return;
    const int64_t inner = padded(a->ffn_width);
    normalise(x.at(first * dim), rows, a->dim, false, normed.at(0));
    gate_rows.reserve(rows * inner), hidden.reserve(rows * inner);
    multiply(normed.at(0), dim, rows, a->dim, block.ffn_gate, inner, gate_rows.at(0), false);
    multiply(normed.at(0), dim, rows, a->dim, block.ffn_up, inner, hidden.at(0), false);
    for (int64_t i = 0; i < rows * inner; i += kWidth)
      store(hidden.at(i), silu(load(gate_rows.at(i))) * load(hidden.at(i)));
    multiply(hidden.at(0), inner, rows, a->ffn_width, block.ffn_down, dim, x.at(first * dim), true);
  }

  void score() {
    const int64_t rows = r->num_candidates, inner = padded(a->head_width), labels = padded(a->num_labels);
    normalise(x.at(r->num_events * dim), rows, a->dim, true, normed.at(0));
    hidden.reserve(rows * inner), outs.reserve(rows * labels);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(a->head_up_bias, inner, hidden.at(row * inner));
      std::copy_n(a->head_down_bias, labels, outs.at(row * labels));
    }
    multiply(normed.at(0), dim, rows, a->dim, a->head_up, inner, hidden.at(0), true);
    for (int64_t i = 0; i < rows * inner; i += kWidth) store(hidden.at(i), max(load(hidden.at(i)), Floats{}));
    multiply(hidden.at(0), inner, rows, a->head_width, a->head_down, labels, outs.at(0), true);
    for (int64_t row = 0; row < rows; ++row)
      std::copy_n(outs.at(row * labels), a->num_labels, r->scores + row * a->num_labels);
  }

  // ---- attention ----

  // The channels of position and time: sums over the history that all queries with these biases share, [2, values].
  void share_channels(const float* v, const float* by_position, const float* by_time, int64_t num_keys, float* sums) {
    for (int64_t i = 0; i < num_keys; ++i, v += values)
      for (int64_t column = 0; column < values; ++column) {
        sums[column] += by_position[i] * v[column];
        sums[values + column] += by_time[i] * v[column];
      }
  }

  // Writes the channels of one row: content divided by the norm, then position and time.
  void write(int64_t row, int64_t h, const float* content, Room& channels) {
    const float factor = static_cast<float>(1.0 / a->norm);
    for (int64_t i = 0; i < V; ++i) to(row)[h * V + i] = content[i] * factor;
    if (C == 1) return;
    for (int64_t i = h * V; i < (h + 1) * V; ++i) {
      to(row)[values + i] = *channels.at(i);
      to(row)[2 * values + i] = *channels.at(values + i);
    }
  }

  // All candidates, and the event unless nothing reads it any more. They share each tile of keys and values while it is in
  // the first-level cache: histories are longer than the second.
  void attend(int64_t number, bool with_event) {
    const int64_t count = r->num_candidates, first = r->num_events, wide = round_up(count, kPanel);
    const float *k = r->keys[number], *v = r->values[number];
    panels.reserve(H * wide * Dp), outs.zeros(H * count * Vp), event_outs.zeros(H * Vp);
    scores.reserve(kKeyTile * kQueryTile), flat.reserve(kKeyTile * Vp), weights.reserve(kKeyTile);
    if (C > 1) shared.zeros(2 * values), event_shared.zeros(2 * values);
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < count; i += kPanel)
        make_panel(query(first + i) + h * D, projected, std::min<int64_t>(kPanel, count - i), D,
                   panels.at((h * wide + i) * Dp));
    for (int64_t j = 0; j < r->num_cached; j += kKeyTile)
      add_keys(k + j * H * D, v + j * values, values, j, std::min(kKeyTile, r->num_cached - j), with_event);
    if (first) add_keys(key(0), value(0), values, r->num_cached, 1, with_event);
    for (int64_t h = 0; with_event && h < H; ++h) write(0, h, event_outs.at(h * Vp), event_shared);
    for (int64_t row = 0; row < count; ++row)
      for (int64_t h = 0; h < H; ++h) {
        add_self(first + row, h, outs.at((h * count + row) * Vp));
        write(first + row, h, outs.at((h * count + row) * Vp), shared);
        for (int64_t i = h * V; C > 1 && i < (h + 1) * V; ++i) {
          to(first + row)[values + i] += self_position * value(first + row)[i];
          to(first + row)[2 * values + i] += self_time * value(first + row)[i];
        }
      }
  }

  // Adds some keys of the history from the j-th on, and their values, to the sums of all queries.
  void add_keys(const float* k, const float* v, int64_t v_row, int64_t j, int64_t num_keys, bool with_event) {
    if (C > 1) share_channels(v, position.at(j), time.at(j), num_keys, shared.at(0));
    if (C > 1 && with_event) share_channels(v, event_position.at(j), time.at(j), num_keys, event_shared.at(0));
    for (int64_t h = 0; h < H; ++h, k += D, v += V) {
      Right right{v, v_row, kPanel};
      if (V % kWidth) {  // products read whole vectors
        for (int64_t i = 0; i < num_keys; ++i) {
          std::copy_n(v + i * v_row, V, flat.at(i * Vp));
          std::fill_n(flat.at(i * Vp) + V, Vp - V, 0.0f);
        }
        right = {flat.at(0), Vp, kPanel};
      }
      if (with_event) add_to_event(h, k, right, C == 1 ? event_position.at(j) : nullptr, num_keys);
      add_to_candidates(h, k, right, C == 1 ? position.at(j) : nullptr, num_keys);
    }
  }

  // The event is one query, so a score is a product of two rows.
  void add_to_event(int64_t h, const float* k, Right v, const float* bias, int64_t num_keys) {
    dots(num_keys, D, k, H * D, query(0) + h * D, bias, weights.at(0));
    for (int64_t i = 0; i < num_keys; i += kWidth) store(weights.at(i), silu(load(weights.at(i))));
    product_rows<1>(Vp, num_keys, Left{weights.at(0), 0, 1}, v, event_outs.at(h * Vp), Vp, true);
  }

  void add_to_candidates(int64_t h, const float* k, Right v, const float* bias, int64_t num_keys) {
    const int64_t count = r->num_candidates, panel = Dp * kPanel;
    for (int64_t i = 0; i < count; i += kQueryTile) {
      const int64_t queries = std::min(kQueryTile, count - i), width = round_up(queries, kWidth);
      const float* q = panels.at((h * round_up(count, kPanel) + i) * Dp);
      int64_t j = 0, row = 0;
      for (; j + kTall <= num_keys; j += kTall) {
        for (int64_t ahead = j + kKeyTile; i == 0 && ahead < j + kKeyTile + kTall; ++ahead) {
          prefetch(k + ahead * H * D, D);
          prefetch(v.data + ahead * v.row, V);
        }
        score_rows<kTall>(width, D, panel, k + j * H * D, H * D, q, bias ? bias + j : nullptr, scores.at(j * kQueryTile));
      }
      for (; j < num_keys; j += kRows)
        scores_of(std::min(kRows, num_keys - j), width, D, panel, k + j * H * D, H * D, q, bias ? bias + j : nullptr,
                  scores.at(j * kQueryTile));
      float* sums = outs.at((h * count + i) * Vp);
      for (; row + kTall <= queries; row += kTall)
        product_rows<kTall>(Vp, num_keys, Left{scores.at(row), 1, kQueryTile}, v, sums + row * Vp, Vp, true);
      for (; row < queries; row += kRows)
        product(std::min(kRows, queries - row), Vp, num_keys, Left{scores.at(row), 1, kQueryTile}, v, sums + row * Vp, Vp, true);
    }
  }

  // The candidate's own key, at distance 0 and time 0.
  void add_self(int64_t row, int64_t h, float* sums) {
    const float *q = query(row) + h * D, *k = key(row) + h * D, *v = value(row) + h * V;
    float score = C == 1 ? self_position + self_time : 0.0f;
    for (int64_t i = 0; i < D; ++i) score += q[i] * k[i];
    const float weight = silu(splat(score))[0];
    for (int64_t i = 0; i < V; ++i) sums[i] += weight * v[i];
  }
};

}  // namespace

extern "C" {

// Scores of all requests' candidates; 0, or -1 if memory ran out.
int64_t nestpipe_prefix_hit(const PrefixHit* a) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  auto work = [&] {
    try {
      static thread_local HitWorker worker;
      for (int64_t i = next++; i < a->num_requests && !failed; i = next++) worker.run(*a, a->requests[i]);
    } catch (const std::exception&) {
      failed = true;
    }
  };
  std::vector<std::thread> threads;
  try {
    for (int64_t i = 1; i < std::min(a->num_threads, a->num_requests); ++i) threads.emplace_back(work);
  } catch (const std::exception&) {
    // Fewer threads do the same work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return failed ? -1 : 0;
}
}
