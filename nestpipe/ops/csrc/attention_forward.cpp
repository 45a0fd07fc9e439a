// Attention, forward: tiles of weights times values, row block by row block.

#include "attention_tiles.h"

namespace {

using namespace nestpipe;

struct Forward : Tiles {
  using Tiles::Tiles;

  Room packed_k, flat_v;  // of a sequence, head by head: panels [D, kPanel], and [keys, V]
  Room queries;           // of a block: [heads, queries, D], times scale
  Room outs, rest;

  void run(const Sequence& s, const Task& task) {
    const int64_t heads = task.last_head - task.first_head;
    read_keys(s, task);
    for (Room* room : {&scores, &bias, &bias_time}) room->reserve(kQueries * kKeys);
    queries.reserve(heads * kQueries * Dp);
    outs.reserve(heads * C * kQueries * Vp);
    rest.reserve(heads * 2 * kQueries);  // softmax: the largest score so far, and the sum
    for (int64_t query = 0; query < s.num_queries; query += kQueries) {
      const int64_t rows = std::min(kQueries, s.num_queries - query);
      copy(query_rows(s.first_query + query, task.first_head), rows, heads, scale, queries.at(0), kQueries * Dp);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t channel = 0; channel < C; ++channel) std::fill_n(out(h, channel), rows * Vp, 0.0f);
        std::fill_n(largest(h), rows, -std::numeric_limits<float>::infinity());
        std::fill_n(total(h), rows, 0.0f);
      }
      for (int64_t key = 0; key < s.seen(query + rows - 1); key += kKeys) {
        const Tile t{query, rows, key};
        fill_biases(s, t);
        for (int64_t h = 0; h < heads; ++h) forward_tile(s, t, h);
      }
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t h = 0; h < heads; ++h) {
          if (s.is_target(query + row)) forward_self(s, query + row, task.first_head + h, row, h);
          write_out(s.first_query + query + row, task.first_head + h, row, h);
        }
    }
  }

  void read_keys(const Sequence& s, const Task& task) {
    const int64_t n = s.num_history, heads = task.last_head - task.first_head, padded = round_up(n, kPanel);
    packed_k.reserve(heads * padded * Dp);
    flat_v.reserve(heads * n * Vp);
    make_panels(key_rows(s.first_key, task.first_head), n, heads, packed_k.at(0), padded * Dp);
    copy(value_rows(s.first_key, task.first_head), n, heads, 1.0f, flat_v.at(0), n * Vp);
  }

  float* largest(int64_t h) { return rest.at(h * 2 * kQueries); }
  float* total(int64_t h) { return rest.at((h * 2 + 1) * kQueries); }
  float* out(int64_t h, int64_t channel) { return outs.at((h * C + channel) * kQueries * Vp); }

  void forward_tile(const Sequence& s, const Tile& t, int64_t h) {
    const float* k = packed_k.at((h * round_up(s.num_history, kPanel) + t.key) * Dp);
    multiply(s, t, queries.at(h * kQueries * Dp), Dp, D, k, scores.at(0));
    const bool biased = add && (by_position || by_time);
    for (int64_t row = 0; row < t.rows; ++row) {
      float *x = scores.at(row * kKeys), *b = biased ? bias.at(row * kKeys) : nullptr;
      const int64_t seen = t.seen(s, row);
      if (silu)
        silu_row(x, b, seen);
      else
        softmax_row(x, b, seen, out(h, 0) + row * Vp, largest(h)[row], total(h)[row]);
      clear_beside(x, seen);
    }
    const float* v = flat_v.at((h * s.num_history + t.key) * Vp);
    times_keys(s, t, scores.at(0), v, Vp, out(h, 0));
    if (!add && by_position) times_keys(s, t, bias.at(0), v, Vp, out(h, 1));
    if (!add && by_time) times_keys(s, t, bias_time.at(0), v, Vp, out(h, time_channel));
  }

  // Weights before the norm; the sums are divided by it at the end.
  static void silu_row(float* x, const float* b, int64_t seen) {
    for (int64_t column = 0; column < seen; column += kWidth) {
      const Floats value = score(x, b, column);
      store(x + column, keep_seen(value / (exp_minus(value) + 1.0f), seen - column));
    }
  }

  // Online softmax: turns a row's scores into weights relative to the running maximum, and rescales earlier sums.
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

  void forward_self(const Sequence& s, int64_t query, int64_t head, int64_t row, int64_t h) {
    const float x = self_score(s, query, head);
    const float* v = value_rows(s.first_key + s.place(query), head).data;
    float *to = out(h, 0) + row * Vp, weight;
    if (silu) {
      weight = x / (exp_minus(splat(x))[0] + 1.0f);
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
    const float factor = silu ? inverse_norm : 1.0f / total(h)[row];
    if (!silu) a.kept[place * H + head] = largest(h)[row] + std::log(total(h)[row]);
    for (int64_t channel = 0; channel < C; ++channel)
      write(out(h, channel) + row * Vp, V, channel == 0 ? factor : 1.0f, a.out + ((place * C + channel) * H + head) * V);
  }
};

}  // namespace

extern "C" {

// 0, or -1 if memory ran out.
int64_t nestpipe_attention_forward(const Attention* a) {
  try {
    std::vector<int64_t> order;
    const std::vector<Task> tasks = make_tasks(*a, order);
    Tables tables(*a);
    return run_tasks<Forward>(*a, tables, tasks, [&](Forward& worker, size_t i) {
      for (int64_t place = tasks[i].first; place < tasks[i].last; ++place)
        worker.run(Sequence(*a, order[place]), tasks[i]);
    }) ? 0 : -1;
  } catch (const std::exception&) {
    return -1;
  }
}
}
