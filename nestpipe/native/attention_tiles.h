// Tiles of kQueries x kKeys over one sequence: scores by small products, biases, and products with keys and values.
//
// A row sees keys 0 .. seen-1 and, if it is a target, itself, which is handled apart: so its bits depend neither on other
// targets nor on how many of the keys were cached. Only what a row sees is computed, to the grain of kRows rows.

#pragma once

#include "attention.h"

namespace nestpipe {

// What forward and backward share: packed keys and values of a sequence, and the tiles over them.
struct Tiles {
  Tiles(const Attention& attention, Tables& shared) : a(attention), tables(shared) {}

  const Attention& a;
  Tables& tables;
  const bool silu = a.kind == kSilu, add = a.mode == kAdd;
  const bool by_position = a.position != nullptr;
  const bool by_time = a.starts != nullptr && (a.time != nullptr || a.decay != nullptr);
  const int64_t D = a.qk_width, V = a.v_width, Dp = round_up(D, kWidth), Vp = round_up(V, kWidth);
  const int64_t H = a.num_heads, C = a.num_channels;
  const int64_t time_channel = by_position ? 2 : 1;
  const float scale = static_cast<float>(a.scale), inverse_norm = static_cast<float>(1.0 / a.norm);

  Room packed_k, packed_v;  // [D, keys] and [V, keys]
  Room flat_k, flat_v;      // [keys, D] and [keys, V], rows padded to whole vectors
  Room sum_k, sum_v;        // their gradients
  Room scores, bias, bias_time;
  int64_t stride = 0;  // of packed keys

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
    for (int64_t i = 0; i < n; ++i)
      for (int64_t column = 0; column < width; ++column) to[column * stride + i] = from[i * row + column];
    for (int64_t column = 0; column < width; ++column)
      for (int64_t i = n; i < stride; ++i) to[column * stride + i] = 0.0f;
  }

  static void copy(const float* from, int64_t row, int64_t n, int64_t width, float* to, int64_t padded) {
    for (int64_t i = 0; i < n; ++i, from += row, to += padded) {
      int64_t column = 0;
      for (; column + kWidth <= width; column += kWidth) store(to + column, load(from + column));
      for (; column < padded; ++column) to[column] = column < width ? from[column] : 0.0f;
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

  // ---- a target and itself ----

  const float* query_row(int64_t row, int64_t head) const { return a.q + row * a.q_row + head * D; }

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
};

}  // namespace nestpipe
