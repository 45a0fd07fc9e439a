// Attention, backward: recomputes the scores tile by tile, and all gradients.
//
// The outer loop runs over blocks of keys, the inner one over the queries that see the block. The block's keys, values and
// their gradients stay in cache; queries, output gradients and query gradients are streamed.
//
// Gradients of biases are summed over the heads of a tile, then per task, then in the order of tasks.

#include "attention_tiles.h"

namespace {

using namespace nestpipe;

// Private sums of the gradients of biases.
struct BiasSums {
  Room position;  // by longest - distance
  Room time;      // kWidth vector lanes per bucket
  double decay[3] = {0, 0, 0};
};

struct Backward : Tiles {
  using Tiles::Tiles;

  Room queries, grads, d_queries;                 // of a sequence, head by head: [queries, D], [channels, queries, V]
  Room taken_off;                                 // softmax: the dot product of gradient and output of each row [heads, queries]
  Room packed_k, packed_v, flat_k, sum_k, sum_v;  // of a block of keys, head by head
  Room weights, d_bias, d_bias_time;              // tiles
  BiasSums* sums = nullptr;

  void run(const Sequence& s, const Task& task) {
    const int64_t heads = task.last_head - task.first_head, n = s.num_queries;
    for (Room* room : {&scores, &weights, &bias, &bias_time, &d_bias, &d_bias_time}) room->reserve(kQueries * kKeys);
    for (Room* room : {&packed_k, &flat_k, &sum_k}) room->reserve(heads * kKeys * Dp);
    for (Room* room : {&packed_v, &sum_v}) room->reserve(heads * kKeys * Vp);
    queries.reserve(heads * n * Dp);
    grads.reserve(heads * C * n * Vp);
    d_queries.zeros(heads * n * Dp);
    taken_off.reserve(heads * n);
    read_queries(s, task.first_head, heads);
    for (int64_t key = 0; key < s.num_history; key += kKeys) {
      const int64_t count = std::min(kKeys, s.num_history - key);
      read_keys(s.first_key + key, count, task.first_head, heads);
      for (int64_t query = s.first_that_sees(key); query < n; query += kQueries) {
        const Tile t{query, std::min(kQueries, n - query), key};
        fill_biases(s, t);
        for (int64_t h = 0; h < heads; ++h) backward_tile(s, t, task.first_head + h, h);
        sum_biases(s, t);
      }
      write_keys(s.first_key + key, count, task.first_head, heads);
    }
    for (int64_t query = 0; query < n; ++query)
      for (int64_t h = 0; h < heads; ++h) {
        if (s.is_target(query)) backward_self(s, query, task.first_head + h, h);
        write(d_queries.at((h * n + query) * Dp), D, scale, a.d_q + ((s.first_query + query) * H + task.first_head + h) * D);
      }
  }

  float* grad(const Sequence& s, int64_t h, int64_t channel, int64_t query) {
    return grads.at(((h * C + channel) * s.num_queries + query) * Vp);
  }

  // Queries times scale, and gradients of the output, those of silu divided by the norm.
  void read_queries(const Sequence& s, int64_t head, int64_t heads) {
    const int64_t n = s.num_queries;
    copy(query_rows(s.first_query, head), n, heads, scale, queries.at(0), n * Dp);
    for (int64_t channel = 0; channel < C; ++channel) {
      const Rows rows{a.grad + ((s.first_query * C + channel) * H + head) * V, C * H * V, V};
      copy(rows, n, heads, silu && channel == 0 ? inverse_norm : 1.0f, grad(s, 0, channel, 0), C * n * Vp);
    }
    for (int64_t h = 0; h < heads && !silu; ++h)
      for (int64_t query = 0; query < n; ++query) {
        const float* value = a.out + ((s.first_query + query) * C * H + head + h) * V;
        double dot = 0;
        for (int64_t i = 0; i < V; ++i) dot += static_cast<double>(grad(s, h, 0, query)[i]) * value[i];
        *taken_off.at(h * n + query) = static_cast<float>(dot);
      }
  }

  void read_keys(int64_t first, int64_t count, int64_t head, int64_t heads) {
    copy(key_rows(first, head), count, heads, 1.0f, flat_k.at(0), kKeys * Dp);
    make_panels(key_rows(first, head), count, heads, packed_k.at(0), kKeys * Dp);
    make_panels(value_rows(first, head), count, heads, packed_v.at(0), kKeys * Vp);
    for (int64_t h = 0; h < heads; ++h) {
      std::fill_n(sum_k.at(h * kKeys * Dp), count * Dp, 0.0f);
      std::fill_n(sum_v.at(h * kKeys * Vp), count * Vp, 0.0f);
    }
  }

  void write_keys(int64_t first, int64_t count, int64_t head, int64_t heads) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        write(sum_k.at((h * kKeys + i) * Dp), D, 1.0f, a.d_k + ((first + i) * H + head + h) * D);
        write(sum_v.at((h * kKeys + i) * Vp), V, 1.0f, a.d_v + ((first + i) * H + head + h) * V);
      }
  }

  void backward_tile(const Sequence& s, const Tile& t, int64_t head, int64_t h) {
    float *q = queries.at((h * s.num_queries + t.query) * Dp), *g = grad(s, h, 0, t.query);
    float *d_v = sum_v.at(h * kKeys * Vp), *d_scores = weights.at(0);
    multiply(s, t, q, Dp, D, packed_k.at(h * kKeys * Dp), scores.at(0));
    multiply(s, t, g, Vp, V, packed_v.at(h * kKeys * Vp), d_scores);
    for (int64_t row = 0; row < t.rows; ++row) {
      float *x = scores.at(row * kKeys), *d = d_scores + row * kKeys;
      const int64_t seen = t.seen(s, row), query = t.query + row;
      const float* b = add && (by_position || by_time) ? bias.at(row * kKeys) : nullptr;
      if (silu)
        silu_row(x, d, b, seen);
      else
        softmax_row(x, d, b, seen, a.kept[(s.first_query + query) * H + head], *taken_off.at(h * s.num_queries + query));
      clear_beside(x, seen);
      clear_beside(d, seen);
      if (b != nullptr) add_to(d_bias.at(row * kKeys), d, seen, h == 0);
    }
    times_queries(s, t, scores.at(0), g, Vp, d_v);
    times_queries(s, t, d_scores, q, Dp, sum_k.at(h * kKeys * Dp));
    times_keys(s, t, d_scores, flat_k.at(h * kKeys * Dp), Dp, d_queries.at((h * s.num_queries + t.query) * Dp));
    if (!add && by_position) backward_channel(s, t, h, 1, bias.at(0), d_bias.at(0));
    if (!add && by_time) backward_channel(s, t, h, time_channel, bias_time.at(0), d_bias_time.at(0));
  }

  // Scores to weights, and gradients of weights to those of scores; the norm is in the gradients already.
  static void silu_row(float* x, float* d, const float* b, int64_t seen) {
    for (int64_t column = 0; column < seen; column += kWidth) {
      const Floats value = score(x, b, column), gate = 1.0f / (exp_minus(value) + 1.0f), weight = value * gate;
      store(x + column, keep_seen(weight, seen - column));
      store(d + column, keep_seen(load(d + column) * fma(weight, 1.0f - gate, gate), seen - column));
    }
  }

  static void softmax_row(float* x, float* d, const float* b, int64_t seen, float log_sum, float off) {
    for (int64_t column = 0; column < seen; column += kWidth) {
      const Floats weight = exp(score(x, b, column) - log_sum);
      store(x + column, keep_seen(weight, seen - column));
      store(d + column, keep_seen((load(d + column) - off) * weight, seen - column));
    }
  }

  void backward_channel(const Sequence& s, const Tile& t, int64_t h, int64_t channel, float* matrix, float* d_matrix) {
    float* g = grad(s, h, channel, t.query);
    times_queries(s, t, matrix, g, Vp, sum_v.at(h * kKeys * Vp));
    multiply(s, t, g, Vp, V, packed_v.at(h * kKeys * Vp), scores.at(0));
    for (int64_t row = 0; row < t.rows; ++row)
      add_to(d_matrix + row * kKeys, scores.at(row * kKeys), t.seen(s, row), h == 0);
  }

  static void add_to(float* to, const float* from, int64_t seen, bool first) {
    for (int64_t column = 0; column < seen; column += kWidth) {
      const Floats value = keep_seen(load(from + column), seen - column);
      store(to + column, first ? value : load(to + column) + value);
    }
  }

  // The gradients of a tile's biases, summed over heads, into the private sums.
  void sum_biases(const Sequence& s, const Tile& t) {
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t seen = t.seen(s, row), query = t.query + row;
      const float* by_time_grad = (add ? d_bias : d_bias_time).at(row * kKeys);
      if (by_position)
        add_to(sums->position.at(tables.longest - s.stands(query) + t.key), d_bias.at(row * kKeys), seen, false);
      if (by_time) sum_time(*starts(s, query) + t.key, by_time_grad, seen);
    }
  }

  void sum_time(int64_t pair, const float* grad, int64_t seen) {
    if (a.time != nullptr) {
      float* to = sums->time.at(0);
      const uint8_t* bucket = a.buckets + pair;
      int64_t column = 0;
      for (; column + kWidth <= seen; column += kWidth) {
        if (alike(bucket + column)) {
          float* its = to + bucket[column] * kWidth;
          store(its, load(its) + load(grad + column));
          continue;
        }
#pragma GCC unroll 16
        for (int lane = 0; lane < kWidth; ++lane) to[bucket[column + lane] * kWidth + lane] += grad[column + lane];
      }
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

  void backward_self(const Sequence& s, int64_t query, int64_t head, int64_t h) {
    const int64_t place = s.first_query + query, key = s.first_key + s.place(query), at = h * s.num_queries + query;
    const float x = self_score(s, query, head);
    const float *v = value_rows(key, head).data, *k = key_rows(key, head).data, *q = queries.at(at * Dp);
    float by_channel[3] = {0, 0, 0};
    for (int64_t channel = 0; channel < C; ++channel)
      for (int64_t i = 0; i < V; ++i) by_channel[channel] += grad(s, h, channel, query)[i] * v[i];
    float weight, slope;
    if (silu) {
      const float gate = 1.0f / (exp_minus(splat(x))[0] + 1.0f);
      weight = x * gate;
      slope = by_channel[0] * (gate + weight * (1.0f - gate));
    } else {
      weight = exp(splat(x - a.kept[place * H + head]))[0];
      slope = (by_channel[0] - *taken_off.at(at)) * weight;
    }
    for (int64_t i = 0; i < V; ++i) {
      float total_grad = weight * grad(s, h, 0, query)[i];
      if (!add && by_position) total_grad += self_position() * grad(s, h, 1, query)[i];
      if (!add && by_time) total_grad += self_time(s, query) * grad(s, h, time_channel, query)[i];
      a.d_v[(key * H + head) * V + i] = total_grad;
    }
    for (int64_t i = 0; i < D; ++i) {
      a.d_k[(key * H + head) * D + i] = slope * q[i];
      d_queries.at(at * Dp)[i] += slope * k[i];
    }
    if (by_position) *sums->position.at(tables.longest) += add ? slope : by_channel[1];
    const Floats by_time_grad = splat(add ? slope : by_channel[by_time ? time_channel : 0]);
    if (by_time) sum_time(self_pair(s, query), reinterpret_cast<const float*>(&by_time_grad), 1);
  }
};

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

}  // namespace

extern "C" {

// 0, or -1 if memory ran out.
int64_t nestpipe_attention_backward(const Attention* a) {
  try {
    std::vector<int64_t> order;
    const std::vector<Task> tasks = make_tasks(*a, order);
    Tables tables(*a);
    std::vector<BiasSums> sums(tasks.size());
    const bool done = run_tasks<Backward>(*a, tables, tasks, [&](Backward& worker, size_t i) {
      if (a->position != nullptr) sums[i].position.zeros(tables.size());
      if (a->time != nullptr) sums[i].time.zeros(a->num_time * kWidth);
      worker.sums = &sums[i];
      for (int64_t place = tasks[i].first; place < tasks[i].last; ++place)
        worker.run(Sequence(*a, order[place]), tasks[i]);
    });
    if (done) add_biases(*a, tables, sums);
    return done ? 0 : -1;
  } catch (const std::exception&) {
    return -1;
  }
}
}
