// Attention over jagged sequences, forward and backward, as defined in ops/attention.py.
//
// A task is one sequence (or several short ones) and a group of heads that share the biases of a tile. It packs k and v,
// then walks tiles of kQueries x kKeys: scores by small products, biases, silu or softmax, products with v. Backward walks
// the same tiles and computes the scores again. Only what a row sees is computed, to the grain of kRows rows.
//
// A row sees keys 0 .. seen-1 and, if it is a target, itself, which is handled apart: so its bits depend neither on other
// targets nor on how many of the keys were cached. Gradients of biases are summed per task and then in the order of
// tasks, which depends on lengths alone: the number of threads leaves no trace.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

#include "simd.h"

namespace {

using namespace nestpipe;

constexpr int64_t kQueries = 48;
constexpr int64_t kKeys = 64;
constexpr int64_t kTasks = 64;      // short sequences share a task, so that there are about this many
constexpr int64_t kGroupWidth = 64;  // heads share a tile's biases up to this width in all: beyond, caches count for more
constexpr int64_t kSilu = 0;
constexpr int64_t kAdd = 0;

}  // namespace

// The arguments of all functions; ops/native.py has the same list.
struct Attention {
  const float *q, *k, *v;
  int64_t q_row, k_row, v_row;  // floats from one row to the next; heads follow each other
  const int64_t *query_offsets, *key_offsets, *num_targets;
  const float* position;
  int64_t num_position;
  const float* time;
  int64_t num_time;
  const float* decay;
  const int64_t* starts;  // where the pairs of each query begin
  const uint8_t* buckets;
  const float* log_gaps;
  int64_t num_sequences, num_heads, qk_width, v_width, num_channels;
  int64_t kind, mode, num_threads;
  double scale, norm;
  float *out, *kept;
  const float* grad;
  float *d_q, *d_k, *d_v, *d_position, *d_time, *d_decay;
};

namespace {

// Floats on the boundary of a vector.
class Room {
 public:
  // Room for this many, with any content.
  void reserve(int64_t size) {
    if (size > capacity_) {
      capacity_ = round_up(size, kWidth) + kWidth;
      data_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(capacity_ * 4, 64))));
      if (!data_) throw std::bad_alloc();
    }
  }
  void zeros(int64_t size) {
    reserve(size);
    std::fill_n(data_.get(), size, 0.0f);
  }
  float* at(int64_t place) { return data_.get() + place; }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t capacity_ = 0;
};

struct Task {
  int64_t first, last;  // in the order of sequences
  int64_t first_head, last_head;
  double cost;
};

// Private sums of the gradients of biases.
struct BiasSums {
  Room position;  // by longest - distance
  Room time;      // kWidth lanes per bucket
  double decay[3] = {0, 0, 0};
};

// One sequence: where its rows are, and what they see.
struct Sequence {
  int64_t first_query, num_queries, first_key, num_keys, num_history;

  Sequence(const Attention& a, int64_t number)
      : first_query(a.query_offsets[number]),
        num_queries(a.query_offsets[number + 1] - first_query),
        first_key(a.key_offsets[number]),
        num_keys(a.key_offsets[number + 1] - first_key),
        num_history(num_keys - a.num_targets[number]) {}

  int64_t place(int64_t query) const { return num_keys - num_queries + query; }
  int64_t seen(int64_t query) const { return std::min(place(query) + 1, num_history); }
  bool is_target(int64_t query) const { return place(query) >= num_history; }
  int64_t stands(int64_t query) const { return std::min(place(query), num_history); }
};

// Longest sequences first; those too short for a task of their own share one.
std::vector<Task> make_tasks(const Attention& a, std::vector<int64_t>& order) {
  order.resize(a.num_sequences);
  std::iota(order.begin(), order.end(), 0);
  auto cost = [&](int64_t number) {
    const Sequence s(a, number);
    return static_cast<double>(s.num_queries) * static_cast<double>(s.num_keys + 16);
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return cost(x) > cost(y); });
  double total = 0;
  for (int64_t number : order) total += cost(number);
  const int64_t width = std::max(a.qk_width, a.v_width);
  const int64_t group = std::max<int64_t>(1, std::min(a.num_heads, kGroupWidth / width));
  std::vector<Task> tasks;
  for (int64_t first = 0, last; first < a.num_sequences && cost(order[first]) > 0; first = last) {
    double sum = 0;
    for (last = first; last < a.num_sequences && cost(order[last]) > 0 && (last == first || sum < total / kTasks); ++last)
      sum += cost(order[last]);
    for (int64_t head = 0; head < a.num_heads; head += group)
      tasks.push_back({first, last, head, std::min(head + group, a.num_heads), sum});
  }
  return tasks;
}

// Tables that all tasks read: the position bias reversed, so that a row of keys reads it forward.
struct Tables {
  int64_t longest = 0;
  Room position;

  explicit Tables(const Attention& a) {
    for (int64_t s = 0; s < a.num_sequences; ++s)
      longest = std::max(longest, a.key_offsets[s + 1] - a.key_offsets[s]);
    if (a.position == nullptr) return;
    position.zeros(size());
    for (int64_t distance = 0; distance <= longest; ++distance)
      *position.at(longest - distance) = a.position[std::min(distance, a.num_position - 1)];
  }
  // Vectors of hidden keys reach behind distance 0.
  int64_t size() const { return longest + 1 + kKeys + kWidth; }
};

struct Worker {
  Worker(const Attention& attention, Tables& shared) : a(attention), tables(shared) {}

  const Attention& a;
  Tables& tables;
  const bool silu = a.kind == kSilu, add = a.mode == kAdd;
  const bool by_position = a.position != nullptr;
  const bool by_time = a.starts != nullptr && (a.time != nullptr || a.decay != nullptr);
  const int64_t D = a.qk_width, V = a.v_width, Dp = round_up(D, kWidth), Vp = round_up(V, kWidth);
  const int64_t H = a.num_heads, C = a.num_channels;
  const int64_t time_channel = by_position ? 2 : 1;
  const float scale = static_cast<float>(a.scale), inverse_norm = static_cast<float>(1.0 / a.norm);

  Room packed_k, packed_v, flat_k, flat_v, flat_q, flat_grad, sum_k, sum_v;
  Room scores, weights, bias, bias_time, d_bias, d_bias_time, outs, d_queries, rest;
  int64_t stride = 0;  // of packed keys
  BiasSums* sums = nullptr;

  // ---- packing ----

  // k and v of the history, head by head: [D, keys] and [keys, V] for forward, the others for backward too.
  void pack(const Sequence& s, const Task& task, bool backward) {
    const int64_t n = s.num_history, heads = task.last_head - task.first_head;
    stride = round_up(n, 2 * kWidth);
    packed_k.reserve(heads * D * stride);
    flat_v.reserve(heads * n * Vp);
    if (backward) {
      packed_v.reserve(heads * V * stride);
      flat_k.reserve(heads * n * Dp);
      sum_k.zeros(heads * n * Dp);
      sum_v.zeros(heads * n * Vp);
    }
    for (int64_t h = 0; h < heads; ++h) {
      const float* k = a.k + s.first_key * a.k_row + (task.first_head + h) * D;
      const float* v = a.v + s.first_key * a.v_row + (task.first_head + h) * V;
      transpose(k, a.k_row, n, D, packed_k.at(h * D * stride));
      copy(v, a.v_row, n, V, flat_v.at(h * n * Vp), Vp);
      if (!backward) continue;
      transpose(v, a.v_row, n, V, packed_v.at(h * V * stride));
      copy(k, a.k_row, n, D, flat_k.at(h * n * Dp), Dp);
    }
  }

  void transpose(const float* from, int64_t row, int64_t n, int64_t width, float* to) const {
    for (int64_t first = 0; first < stride; first += 16)
      for (int64_t column = 0; column < width; ++column)
        for (int64_t i = first; i < first + 16; ++i)
          to[column * stride + i] = i < n ? from[i * row + column] : 0.0f;
  }

  static void copy(const float* from, int64_t row, int64_t n, int64_t width, float* to, int64_t padded) {
    for (int64_t i = 0; i < n; ++i) {
      std::copy_n(from + i * row, width, to + i * padded);
      std::fill(to + i * padded + width, to + (i + 1) * padded, 0.0f);
    }
  }

  // ---- tiles ----

  struct Tile {
    int64_t query, rows;    // first query in its sequence, and how many
    int64_t key, columns;   // first key, and how many columns are computed: a multiple of 2 * kWidth
    int64_t seen(const Sequence& s, int64_t row) const {
      return std::clamp<int64_t>(s.seen(query + row) - key, 0, kKeys);
    }
    // How many columns the kRows rows from `row` need.
    int64_t panel(const Sequence& s, int64_t row) const { return seen(s, std::min(row + kRows, rows) - 1); }
  };

  const int64_t* starts(const Sequence& s, int64_t query) const { return a.starts + s.first_query + query; }

  Floats time_bias(int64_t pair) const {
    Floats value{};
    if (a.time != nullptr) value = gather(a.time, a.buckets + pair);
    if (a.decay != nullptr) value = value + a.decay[0] * faded(load(a.log_gaps + pair));
    return value;
  }

  Floats faded(Floats log_gap) const { return exp(-a.decay[1] * exp(a.decay[2] * log_gap)); }

  // The biases of a tile: their sum in add mode, else one matrix each, zero for what is not seen.
  void fill_biases(const Sequence& s, const Tile& t) {
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t seen = t.seen(s, row), query = t.query + row;
      const float* position = by_position ? tables.position.at(tables.longest - s.stands(query) + t.key) : nullptr;
      const int64_t pair = by_time ? *starts(s, query) + t.key : 0;
      float *to = bias.at(row * kKeys), *to_time = bias_time.at(row * kKeys);
      for (int64_t column = 0; column < seen; column += kWidth) {
        Floats value = by_position ? load(position + column) : Floats{};
        if (by_time && add) value = value + time_bias(pair + column);
        const Ints mask = lanes_below(seen - column);
        store(to + column, keep(value, mask));
        if (by_time && !add) store(to_time + column, keep(time_bias(pair + column), mask));
      }
      if (!add) {
        const int64_t done = round_up(seen, kWidth);
        std::fill(to + done, to + std::max(done, t.columns), 0.0f);
        std::fill(to_time + done, to_time + std::max(done, t.columns), 0.0f);
      }
    }
  }

  // to[rows, columns] = left · packed[depth, keys], for what is seen.
  void multiply(const Sequence& s, const Tile& t, Left left, int64_t depth, const float* packed, float* to) const {
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const int64_t columns = std::min(round_up(t.panel(s, row), kWidth), t.columns);
      if (columns == 0) continue;
      product(std::min(kRows, t.rows - row), columns, depth, Left{left.data + row * left.row, left.row, left.step},
              packed + t.key, stride, to + row * kKeys, kKeys, false);
    }
  }

  // to[rows, width] += tile · flat[keys, width], for what is seen.
  void times_keys(const Sequence& s, const Tile& t, float* tile, const float* flat, int64_t width, float* to) const {
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const int64_t depth = t.panel(s, row);
      if (depth == 0) continue;
      product(std::min(kRows, t.rows - row), width, depth, Left{tile + row * kKeys, kKeys, 1}, flat + t.key * width,
              width, to + row * width, width, true);
    }
  }

  // to[keys, width] += tile' · flat[rows, width], for what is seen; the tile is zero elsewhere.
  void times_queries(const Sequence& s, const Tile& t, float* tile, const float* flat, int64_t width, float* to) const {
    const int64_t keys = t.seen(s, t.rows - 1);
    int64_t row = 0;
    for (int64_t key = 0; key < keys; key += kRows) {
      while (t.seen(s, row) <= key) ++row;  // earlier rows do not see this key
      product(std::min(kRows, keys - key), width, t.rows - row, Left{tile + row * kKeys + key, 1, kKeys},
              flat + row * width, width, to + (t.key + key) * width, width, true);
    }
  }

  Floats score(const float* s, const float* b, int64_t column) const {
    const Floats x = load(s + column) * scale;
    return add && (by_position || by_time) ? x + load(b + column) : x;
  }

  template <typename Walk>
  void tiles(const Sequence& s, int64_t query, Walk walk) {
    Tile t{query, std::min(kQueries, s.num_queries - query), 0, 0};
    const int64_t seen = s.seen(query + t.rows - 1);
    for (; t.key < seen; t.key += kKeys) {
      t.columns = std::min(kKeys, stride - t.key);
      if (by_position || by_time) fill_biases(s, t);
      walk(t);
    }
  }

  // ---- forward ----

  void forward(const Sequence& s, const Task& task) {
    const int64_t heads = task.last_head - task.first_head;
    pack(s, task, false);
    for (Room* room : {&scores, &bias, &bias_time}) room->reserve(kQueries * kKeys);
    outs.reserve(heads * C * kQueries * Vp);
    rest.reserve(heads * 2 * kQueries);  // softmax: the largest score so far, and the sum
    for (int64_t query = 0; query < s.num_queries; query += kQueries) {
      const int64_t rows = std::min(kQueries, s.num_queries - query);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t channel = 0; channel < C; ++channel) std::fill_n(out(h, channel), rows * Vp, 0.0f);
        std::fill_n(largest(h), rows, -std::numeric_limits<float>::infinity());
        std::fill_n(total(h), rows, 0.0f);
      }
      tiles(s, query, [&](const Tile& t) {
        for (int64_t h = 0; h < heads; ++h) forward_tile(s, t, task.first_head + h, h);
      });
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t h = 0; h < heads; ++h) {
          if (s.is_target(query + row)) forward_self(s, query + row, task.first_head + h, row, h);
          write_out(s.first_query + query + row, task.first_head + h, row, h);
        }
    }
  }

  float* largest(int64_t h) { return rest.at(h * 2 * kQueries); }
  float* total(int64_t h) { return rest.at((h * 2 + 1) * kQueries); }
  float* out(int64_t h, int64_t channel) { return outs.at((h * C + channel) * kQueries * Vp); }
  const float* query_row(int64_t row, int64_t head) const { return a.q + row * a.q_row + head * D; }

  void forward_tile(const Sequence& s, const Tile& t, int64_t head, int64_t h) {
    const Left queries{query_row(s.first_query + t.query, head), a.q_row, 1};
    multiply(s, t, queries, D, packed_k.at(h * D * stride), scores.at(0));
    for (int64_t row = 0; row < t.rows; ++row) {
      float *x = scores.at(row * kKeys), *b = bias.at(row * kKeys);
      const int64_t seen = t.seen(s, row), needed = round_up(t.panel(s, row / kRows * kRows), kWidth);
      if (silu) {
        for (int64_t column = 0; column < seen; column += kWidth) {
          const Floats value = score(x, b, column);
          const Floats weight = value * inverse_norm / (exp(-value) + 1.0f);
          store(x + column, seen - column >= kWidth ? weight : keep(weight, lanes_below(seen - column)));
        }
      } else {
        softmax_row(x, b, seen, out(h, 0) + row * Vp, largest(h)[row], total(h)[row]);
      }
      for (int64_t column = round_up(seen, kWidth); column < needed; column += kWidth) store(x + column, Floats{});
    }
    const float* v = flat_v.at(h * s.num_history * Vp);
    times_keys(s, t, scores.at(0), v, Vp, out(h, 0));
    if (!add && by_position) times_keys(s, t, bias.at(0), v, Vp, out(h, 1));
    if (!add && by_time) times_keys(s, t, bias_time.at(0), v, Vp, out(h, time_channel));
  }

  // Turns the scores of a row into weights relative to the largest so far, and rescales what was added before.
  void softmax_row(float* x, const float* b, int64_t seen, float* sums_so_far, float& top, float& sum_of) const {
    if (seen == 0) return;
    Floats high = splat(-std::numeric_limits<float>::infinity());
    for (int64_t column = 0; column < seen; column += kWidth) {
      const Ints mask = lanes_below(seen - column);
      const Floats value = score(x, b, column);
      store(x + column, value);
      high = max(high, mask ? value : high);
    }
    float now = top;
    for (int lane = 0; lane < kWidth; ++lane) now = std::max(now, high[lane]);
    Floats added{};
    for (int64_t column = 0; column < seen; column += kWidth) {
      const Floats weight = keep(exp(load(x + column) - now), lanes_below(seen - column));
      store(x + column, weight);
      added = added + weight;
    }
    rescale(sums_so_far, now, top, sum_of);
    sum_of += sum(added);
  }

  void rescale(float* sums_so_far, float now, float& top, float& sum_of) const {
    const float factor = top == -std::numeric_limits<float>::infinity() ? 0.0f : exp(splat(top - now))[0];
    sum_of *= factor;
    for (int64_t column = 0; column < Vp; column += kWidth) store(sums_so_far + column, load(sums_so_far + column) * factor);
    top = now;
  }

  float self_score(const Sequence& s, int64_t query, int64_t head) const {
    const float *q = query_row(s.first_query + query, head), *k = self_key(s, query, head);
    double dot = 0;
    for (int64_t i = 0; i < D; ++i) dot += static_cast<double>(q[i]) * k[i];
    return static_cast<float>(dot) * scale + (add ? self_position() + self_time(s, query) : 0.0f);
  }

  const float* self_key(const Sequence& s, int64_t query, int64_t head) const {
    return a.k + (s.first_key + s.place(query)) * a.k_row + head * D;
  }
  const float* self_value(const Sequence& s, int64_t query, int64_t head) const {
    return a.v + (s.first_key + s.place(query)) * a.v_row + head * V;
  }
  float self_position() const { return by_position ? a.position[0] : 0.0f; }
  int64_t self_pair(const Sequence& s, int64_t query) const { return *starts(s, query) + s.num_history; }
  float self_time(const Sequence& s, int64_t query) const { return by_time ? time_bias(self_pair(s, query))[0] : 0.0f; }

  void forward_self(const Sequence& s, int64_t query, int64_t head, int64_t row, int64_t h) {
    const float x = self_score(s, query, head);
    const float* v = self_value(s, query, head);
    float *to = out(h, 0) + row * Vp, weight;
    if (silu) {
      weight = x * inverse_norm / (exp(splat(-x))[0] + 1.0f);
    } else {
      const float now = std::max(largest(h)[row], x);
      rescale(to, now, largest(h)[row], total(h)[row]);
      weight = exp(splat(x - now))[0];
      total(h)[row] += weight;
    }
    for (int64_t i = 0; i < V; ++i) {
      to[i] += weight * v[i];
      if (!add && by_position) out(h, 1)[row * Vp + i] += self_position() * v[i];
      if (!add && by_time) out(h, time_channel)[row * Vp + i] += self_time(s, query) * v[i];
    }
  }

  void write_out(int64_t place, int64_t head, int64_t row, int64_t h) {
    if (!silu) {
      const float sum_of = total(h)[row], inverse = 1.0f / sum_of;
      a.kept[place * H + head] = largest(h)[row] + std::log(sum_of);
      for (int64_t i = 0; i < V; ++i) out(h, 0)[row * Vp + i] *= inverse;
    }
    for (int64_t channel = 0; channel < C; ++channel)
      std::copy_n(out(h, channel) + row * Vp, V, a.out + ((place * C + channel) * H + head) * V);
  }

  // ---- backward ----

  void backward(const Sequence& s, const Task& task) {
    const int64_t heads = task.last_head - task.first_head;
    pack(s, task, true);
    for (Room* room : {&scores, &weights, &bias, &bias_time}) room->reserve(kQueries * kKeys);
    flat_q.reserve(heads * kQueries * Dp);
    d_queries.reserve(heads * kQueries * Dp);
    flat_grad.reserve(heads * C * kQueries * Vp);
    for (int64_t query = 0; query < s.num_queries; query += kQueries) {
      const int64_t rows = std::min(kQueries, s.num_queries - query);
      for (int64_t h = 0; h < heads; ++h) read_rows(s, query, rows, task.first_head + h, h);
      tiles(s, query, [&](const Tile& t) {
        if (by_position || (add && by_time)) d_bias.zeros(t.rows * kKeys);
        if (!add && by_time) d_bias_time.zeros(t.rows * kKeys);
        for (int64_t h = 0; h < heads; ++h) backward_tile(s, t, task.first_head + h, h);
        sum_biases(s, t);
      });
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t h = 0; h < heads; ++h) {
          if (s.is_target(query + row)) backward_self(s, query + row, task.first_head + h, row, h);
          float* to = a.d_q + ((s.first_query + query + row) * H + task.first_head + h) * D;
          for (int64_t i = 0; i < D; ++i) to[i] = d_queries.at((h * kQueries + row) * Dp)[i] * scale;
        }
    }
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < s.num_history; ++i) {
        const int64_t place = (s.first_key + i) * H + task.first_head + h;
        for (int64_t c = 0; c < D; ++c) a.d_k[place * D + c] = sum_k.at((h * s.num_history + i) * Dp)[c] * scale;
        std::copy_n(sum_v.at((h * s.num_history + i) * Vp), V, a.d_v + place * V);
      }
  }

  float* grads(int64_t h, int64_t channel) { return flat_grad.at((h * C + channel) * kQueries * Vp); }

  void read_rows(const Sequence& s, int64_t query, int64_t rows, int64_t head, int64_t h) {
    const int64_t place = s.first_query + query;
    std::fill_n(d_queries.at(h * kQueries * Dp), rows * Dp, 0.0f);
    copy(query_row(place, head), a.q_row, rows, D, flat_q.at(h * kQueries * Dp), Dp);
    for (int64_t channel = 0; channel < C; ++channel)
      copy(a.grad + ((place * C + channel) * H + head) * V, C * H * V, rows, V, grads(h, channel), Vp);
  }

  // What softmax takes off each row's gradient: its sum over the output.
  float taken_off(int64_t place, int64_t head) const {
    const float *grad = a.grad + (place * C * H + head) * V, *value = a.out + (place * C * H + head) * V;
    double dot = 0;
    for (int64_t i = 0; i < V; ++i) dot += static_cast<double>(grad[i]) * value[i];
    return static_cast<float>(dot);
  }

  void backward_tile(const Sequence& s, const Tile& t, int64_t head, int64_t h) {
    const int64_t n = s.num_history;
    float *d_v = sum_v.at(h * n * Vp), *d_scores = weights.at(0);
    multiply(s, t, Left{flat_q.at(h * kQueries * Dp), Dp, 1}, D, packed_k.at(h * D * stride), scores.at(0));
    multiply(s, t, Left{grads(h, 0), Vp, 1}, V, packed_v.at(h * V * stride), d_scores);
    for (int64_t row = 0; row < t.rows; ++row) {
      float *x = scores.at(row * kKeys), *d = d_scores + row * kKeys;
      const int64_t seen = t.seen(s, row), place = s.first_query + t.query + row;
      const float* b = bias.at(row * kKeys);
      const float log_sum = silu ? 0.0f : a.kept[place * H + head], off = silu ? 0.0f : taken_off(place, head);
      for (int64_t column = 0; column < seen; column += kWidth) {
        const Floats value = score(x, b, column);
        Floats weight, slope;
        if (silu) {
          const Floats gate = 1.0f / (exp(-value) + 1.0f);
          weight = value * gate * inverse_norm;
          slope = load(d + column) * gate * inverse_norm * fma(value, 1.0f - gate, splat(1.0f));
        } else {
          weight = exp(value - log_sum);
          slope = (load(d + column) - off) * weight;
        }
        const Ints mask = lanes_below(seen - column);
        store(x + column, keep(weight, mask));
        store(d + column, keep(slope, mask));
      }
      std::fill(x + round_up(seen, kWidth), x + std::max(round_up(seen, kWidth), t.columns), 0.0f);
      std::fill(d + round_up(seen, kWidth), d + std::max(round_up(seen, kWidth), t.columns), 0.0f);
      if (add && (by_position || by_time)) add_to(d_bias.at(row * kKeys), d, seen);
    }
    times_queries(s, t, scores.at(0), grads(h, 0), Vp, d_v);
    times_keys(s, t, d_scores, flat_k.at(h * n * Dp), Dp, d_queries.at(h * kQueries * Dp));
    times_queries(s, t, d_scores, flat_q.at(h * kQueries * Dp), Dp, sum_k.at(h * n * Dp));
    if (!add && by_position) backward_channel(s, t, h, 1, bias.at(0), d_bias.at(0), d_v);
    if (!add && by_time) backward_channel(s, t, h, time_channel, bias_time.at(0), d_bias_time.at(0), d_v);
  }

  void backward_channel(const Sequence& s, const Tile& t, int64_t h, int64_t channel, float* matrix, float* d_matrix,
                        float* d_v) {
    times_queries(s, t, matrix, grads(h, channel), Vp, d_v);
    multiply(s, t, Left{grads(h, channel), Vp, 1}, V, packed_v.at(h * V * stride), scores.at(0));
    for (int64_t row = 0; row < t.rows; ++row) add_to(d_matrix + row * kKeys, scores.at(row * kKeys), t.seen(s, row));
  }

  static void add_to(float* to, const float* from, int64_t seen) {
    for (int64_t column = 0; column < seen; column += kWidth)
      store(to + column, load(to + column) + keep(load(from + column), lanes_below(seen - column)));
  }

  // The gradients of a tile's biases, summed over heads, into the private sums.
  void sum_biases(const Sequence& s, const Tile& t) {
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t seen = t.seen(s, row), query = t.query + row;
      const float* by_time_grad = (add ? d_bias : d_bias_time).at(row * kKeys);
      if (by_position) add_to(sums->position.at(tables.longest - s.stands(query) + t.key), d_bias.at(row * kKeys), seen);
      if (by_time) sum_time(*starts(s, query) + t.key, by_time_grad, seen);
    }
  }

  void sum_time(int64_t pair, const float* grad, int64_t seen) {
    if (a.time != nullptr) {
      float* to = sums->time.at(0);
      const uint8_t* bucket = a.buckets + pair;
      int64_t column = 0;
      for (; column + kWidth <= seen; column += kWidth)
#pragma GCC unroll 16
        for (int lane = 0; lane < kWidth; ++lane) to[bucket[column + lane] * kWidth + lane] += grad[column + lane];
      for (; column < seen; ++column) to[bucket[column] * kWidth + column % kWidth] += grad[column];
    }
    if (a.decay == nullptr) return;
    Floats by_alpha{}, by_rate{}, by_beta{};
    for (int64_t column = 0; column < seen; column += kWidth) {
      const Floats log_gap = load(a.log_gaps + pair + column), power = exp(a.decay[2] * log_gap);
      const Floats faint = keep(load(grad + column), lanes_below(seen - column)) * exp(-a.decay[1] * power);
      by_alpha = by_alpha + faint;
      by_rate = fma(faint, power, by_rate);
      by_beta = fma(faint * power, log_gap, by_beta);
    }
    sums->decay[0] += sum(by_alpha);
    sums->decay[1] -= static_cast<double>(a.decay[0]) * sum(by_rate);
    sums->decay[2] -= static_cast<double>(a.decay[0]) * a.decay[1] * sum(by_beta);
  }

  void backward_self(const Sequence& s, int64_t query, int64_t head, int64_t row, int64_t h) {
    const float x = self_score(s, query, head);
    const float *v = self_value(s, query, head), *k = self_key(s, query, head);
    const float* q = flat_q.at((h * kQueries + row) * Dp);
    const int64_t place = s.first_query + query, key = (s.first_key + s.place(query)) * H + head;
    float by_channel[3] = {0, 0, 0};
    for (int64_t channel = 0; channel < C; ++channel)
      for (int64_t i = 0; i < V; ++i) by_channel[channel] += grads(h, channel)[row * Vp + i] * v[i];
    float weight, slope;
    if (silu) {
      const float gate = 1.0f / (exp(splat(-x))[0] + 1.0f);
      weight = x * gate * inverse_norm;
      slope = by_channel[0] * gate * inverse_norm * (1.0f + x * (1.0f - gate));
    } else {
      weight = exp(splat(x - a.kept[place * H + head]))[0];
      slope = (by_channel[0] - taken_off(place, head)) * weight;
    }
    for (int64_t i = 0; i < V; ++i) {
      float total_grad = weight * grads(h, 0)[row * Vp + i];
      if (!add && by_position) total_grad += self_position() * grads(h, 1)[row * Vp + i];
      if (!add && by_time) total_grad += self_time(s, query) * grads(h, time_channel)[row * Vp + i];
      a.d_v[key * V + i] = total_grad;
    }
    for (int64_t i = 0; i < D; ++i) {
      a.d_k[key * D + i] = slope * scale * q[i];
      d_queries.at((h * kQueries + row) * Dp)[i] += slope * k[i];
    }
    if (by_position) *sums->position.at(tables.longest) += add ? slope : by_channel[1];
    const Floats by_time_grad = splat(add ? slope : by_channel[by_time ? time_channel : 0]);
    if (by_time) sum_time(self_pair(s, query), reinterpret_cast<const float*>(&by_time_grad), 1);
  }
};

// Runs all tasks on some threads; the order in which they are taken leaves no trace. False if memory ran out.
template <typename Run>
bool run_tasks(const Attention& a, Tables& tables, const std::vector<Task>& tasks, Run run) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  auto work = [&] {
    try {
      Worker worker(a, tables);
      for (size_t i = next++; i < tasks.size() && !failed; i = next++) run(worker, i);
    } catch (const std::exception&) {
      failed = true;
    }
  };
  std::vector<std::thread> threads;
  try {
    const int64_t wanted = std::min<int64_t>(a.num_threads, static_cast<int64_t>(tasks.size()));
    for (int64_t i = 1; i < wanted; ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer threads do the same work.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return !failed;
}

void add_biases(const Attention& a, const Tables& tables, std::vector<BiasSums>& sums) {
  std::vector<double> position(a.position ? a.num_position : 0), time(a.d_time ? a.num_time : 0);
  double decay[3] = {0, 0, 0};
  for (BiasSums& one : sums) {
    if (a.position != nullptr)
      for (int64_t distance = 0; distance <= tables.longest; ++distance)
        position[std::min(distance, a.num_position - 1)] += *one.position.at(tables.longest - distance);
    for (size_t bucket = 0; bucket < time.size(); ++bucket)
      for (int lane = 0; lane < kWidth; ++lane) time[bucket] += *one.time.at(static_cast<int64_t>(bucket) * kWidth + lane);
    for (int i = 0; i < 3; ++i) decay[i] += one.decay[i];
  }
  for (size_t i = 0; i < position.size(); ++i) a.d_position[i] = static_cast<float>(position[i]);
  for (size_t i = 0; i < time.size(); ++i) a.d_time[i] = static_cast<float>(time[i]);
  for (int i = 0; i < 3 && a.d_decay != nullptr; ++i) a.d_decay[i] = static_cast<float>(decay[i]);
}

// The bucket of a gap: the number of boundaries at or below it. Gaps of neighbours are alike, so the last answer is tried.
class Buckets {
 public:
  Buckets(const int64_t* boundaries, int64_t count) : boundaries_(boundaries), count_(count) {}
  uint8_t of(int64_t gap) {
    if (gap < low_ || gap >= high_) {
      last_ = std::upper_bound(boundaries_, boundaries_ + count_, gap) - boundaries_;
      low_ = last_ ? boundaries_[last_ - 1] : 0;
      high_ = last_ < count_ ? boundaries_[last_] : std::numeric_limits<int64_t>::max();
    }
    return static_cast<uint8_t>(last_);
  }

 private:
  const int64_t* boundaries_;
  int64_t count_, last_ = 0, low_ = 1, high_ = 0;
};

// Seconds between, at least 1, without overflow.
int64_t gap_of(int64_t x, int64_t y) {
  const uint64_t gap = x > y ? static_cast<uint64_t>(x) - static_cast<uint64_t>(y) : static_cast<uint64_t>(y) - static_cast<uint64_t>(x);
  return static_cast<int64_t>(std::clamp<uint64_t>(gap, 1, std::numeric_limits<int64_t>::max()));
}

}  // namespace

extern "C" {

// Where the pairs of each query begin [queries + 1]: a row has the keys it sees, then room up to a whole vector.
void nestpipe_attention_starts(const Attention* a, int64_t* starts) {
  int64_t next = 0;
  for (int64_t number = 0; number < a->num_sequences; ++number) {
    const Sequence s(*a, number);
    for (int64_t query = 0; query < s.num_queries; ++query) {
      starts[s.first_query + query] = next;
      next += round_up(s.seen(query) + 1, 16);
    }
  }
  starts[a->query_offsets[a->num_sequences]] = next + 16;
}

// The bucket and the logarithm of the time between, for every pair; null for what is not wanted.
void nestpipe_attention_pairs(const Attention* a, const int64_t* query_times, const int64_t* key_times,
                              const int64_t* boundaries, int64_t num_boundaries, uint8_t* buckets, float* log_gaps) {
  Buckets search(boundaries, num_boundaries);
  for (int64_t number = 0; number < a->num_sequences; ++number) {
    const Sequence s(*a, number);
    for (int64_t query = 0; query < s.num_queries; ++query) {
      const int64_t asked = query_times[s.first_query + query], start = a->starts[s.first_query + query];
      const int64_t seen = s.seen(query), count = seen + s.is_target(query);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t gap = gap_of(asked, key_times[s.first_key + (i < seen ? i : s.place(query))]);
        if (buckets != nullptr) buckets[start + i] = search.of(gap);
        if (log_gaps != nullptr) log_gaps[start + i] = static_cast<float>(gap);
      }
      for (int64_t i = 0; log_gaps != nullptr && i < count; i += kWidth)
        store(log_gaps + start + i, log(load(log_gaps + start + i)));
    }
  }
}

// 0, or -1 if memory ran out.
int64_t nestpipe_attention_forward(const Attention* a) {
  try {
    std::vector<int64_t> order;
    const std::vector<Task> tasks = make_tasks(*a, order);
    Tables tables(*a);
    return run_tasks(*a, tables, tasks, [&](Worker& worker, size_t i) {
      for (int64_t place = tasks[i].first; place < tasks[i].last; ++place)
        worker.forward(Sequence(*a, order[place]), tasks[i]);
    }) ? 0 : -1;
  } catch (const std::exception&) {
    return -1;
  }
}

int64_t nestpipe_attention_backward(const Attention* a) {
  try {
    std::vector<int64_t> order;
    const std::vector<Task> tasks = make_tasks(*a, order);
    Tables tables(*a);
    std::vector<BiasSums> sums(tasks.size());
    const bool done = run_tasks(*a, tables, tasks, [&](Worker& worker, size_t i) {
      if (a->position != nullptr) sums[i].position.zeros(tables.size());
      if (a->time != nullptr) sums[i].time.zeros(a->num_time * kWidth);
      worker.sums = &sums[i];
      for (int64_t place = tasks[i].first; place < tasks[i].last; ++place)
        worker.backward(Sequence(*a, order[place]), tasks[i]);
    });
    if (done) add_biases(*a, tables, sums);
    return done ? 0 : -1;
  } catch (const std::exception&) {
    return -1;
  }
}
}
