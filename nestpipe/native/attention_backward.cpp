// Attention, backward: the tiles of forward again, with their scores computed anew, and the gradients of everything.
//
// Gradients of biases are summed over the heads of a tile, then per task, then in the order of tasks.

#include "attention_tiles.h"

namespace {

using namespace nestpipe;

// Private sums of the gradients of biases.
struct BiasSums {
  Room position;  // by longest - distance
  Room time;      // kWidth lanes per bucket
  double decay[3] = {0, 0, 0};
};

struct Backward : Tiles {
  using Tiles::Tiles;

  Room weights, d_bias, d_bias_time, d_queries, flat_q, flat_grad;
  BiasSums* sums = nullptr;

  void run(const Sequence& s, const Task& task) {
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
