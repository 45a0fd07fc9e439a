// Tiles of kQueries x kKeys over one sequence: scores by small products, biases, and products with keys and values.
//
// A row sees keys 0 .. seen-1; a target also sees itself, which is handled separately. So a row's result is bitwise
// independent of other targets and of how many keys were cached. Hidden pairs are skipped at a granularity of kRows rows.

#pragma once

#include "attention.h"

namespace nestpipe {

// Shared by forward and backward.
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

  Room scores, bias, bias_time;  // tiles

  // ---- packing ----

  // Rows of some contiguous heads.
  struct Rows {
    const float* data;
    int64_t row, width;
  };

  Rows query_rows(int64_t place, int64_t head) const { return {a.q + place * a.q_row + head * D, a.q_row, D}; }
  Rows key_rows(int64_t place, int64_t head) const { return {a.k + place * a.k_row + head * D, a.k_row, D}; }
  Rows value_rows(int64_t place, int64_t head) const { return {a.v + place * a.v_row + head * V, a.v_row, V}; }

  // Panels [width, kPanel] of n rows, side by side: that of row i is at to + i * (width in whole vectors); heads are stored separately.
  static void make_panels(Rows from, int64_t n, int64_t heads, float* to, int64_t apart) {
    for (int64_t i = 0; i < n; i += kPanel)
      for (int64_t h = 0; h < heads; ++h)
        make_panel(from.data + i * from.row + h * from.width, from.row, std::min<int64_t>(kPanel, n - i), from.width,
                   to + h * apart + i * round_up(from.width, kWidth));
  }

  // Rows padded with zeros to whole vectors, times a factor; heads are stored separately.
  static void copy(Rows from, int64_t n, int64_t heads, float factor, float* to, int64_t apart) {
    const int64_t width = from.width, padded = round_up(width, kWidth);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t h = 0; h < heads; ++h) {
        const float* one = from.data + i * from.row + h * width;
        float* its = to + h * apart + i * padded;
        int64_t column = 0;
        for (; column + kWidth <= width; column += kWidth) store(its + column, load(one + column) * factor);
        for (; column < padded; ++column) its[column] = column < width ? one[column] * factor : 0.0f;
      }
  }

  // One row, times a factor, without padding.
  static void write(const float* from, int64_t width, float factor, float* to) {
    int64_t column = 0;
    for (; column + kWidth <= width; column += kWidth) store(to + column, load(from + column) * factor);
    for (; column < width; ++column) to[column] = from[column] * factor;
  }

  // ---- tiles ----

  struct Tile {
    int64_t query, rows;  // first query in its sequence, and how many
    int64_t key;          // first key
    int64_t seen(const Sequence& s, int64_t row) const {
      return std::clamp<int64_t>(s.seen(query + row) - key, 0, kKeys);
    }
    // How many columns the kRows rows from `row` need.
    int64_t panel(const Sequence& s, int64_t row) const { return seen(s, std::min(row + kRows, rows) - 1); }
  };

  const int64_t* starts(const Sequence& s, int64_t query) const { return a.starts + s.first_query + query; }

  // Prefetch: rows of pairs are too far apart for the hardware prefetcher.
  static constexpr int64_t kAhead = 12;
  void prefetch(int64_t pair) const {
    if (a.time == nullptr) return;
    __builtin_prefetch(a.buckets + pair);
    __builtin_prefetch(a.buckets + pair + kKeys - 1);
  }

  Floats time_bias(int64_t pair) const {
    Floats value{};
    if (a.time != nullptr) value = gather(a.time, a.buckets + pair);
    if (a.decay != nullptr) value = value + a.decay[0] * faded(load(a.log_gaps + pair));
    return value;
  }

  Floats faded(Floats log_gap) const { return exp(-a.decay[1] * exp(a.decay[2] * log_gap)); }

  // The biases of a tile: their sum in add mode, else one matrix each, zero where hidden.
  void fill_biases(const Sequence& s, const Tile& t) {
    if (!by_position && !by_time) return;
    for (int64_t row = 0; row < t.rows; ++row) {
      const int64_t seen = t.seen(s, row), query = t.query + row;
      const float* position = by_position ? tables.position.at(tables.longest - s.stands(query) + t.key) : nullptr;
      const int64_t pair = by_time ? *starts(s, query) + t.key : 0;
      if (by_time && query + kAhead < s.num_queries) prefetch(*starts(s, query + kAhead) + t.key);
      float *to = bias.at(row * kKeys), *to_time = bias_time.at(row * kKeys);
      for (int64_t column = 0; column < seen; column += kWidth) {
        Floats value = by_position ? load(position + column) : Floats{};
        if (by_time && add) value = value + time_bias(pair + column);
        store(to + column, keep_seen(value, seen - column));
        if (by_time && !add) store(to_time + column, keep_seen(time_bias(pair + column), seen - column));
      }
      clear_beside(to, seen);
      if (!add) clear_beside(to_time, seen);
    }
  }

  static Floats score(const float* x, const float* b, int64_t column) {
    return b == nullptr ? load(x + column) : load(x + column) + load(b + column);
  }

  // Products read up to kRows - 1 columns beyond what a row sees: those in its last vector and in the next must be zero.
  static Floats keep_seen(Floats value, int64_t seen) { return seen >= kWidth ? value : keep(value, lanes_below(seen)); }
  static void clear_beside(float* row, int64_t seen) {
    const int64_t next = round_up(seen, kWidth);
    if (next < kKeys) store(row + next, Floats{});
  }

  // to[rows, columns] = left[rows, depth] · panels[depth, keys], for what is seen.
  void multiply(const Sequence& s, const Tile& t, const float* left, int64_t left_row, int64_t depth, const float* panels,
                float* to) const {
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const int64_t columns = round_up(t.panel(s, row), kWidth);
      product(std::min(kRows, t.rows - row), columns, depth, Left{left + row * left_row, left_row, 1},
              Right{panels, kPanel, round_up(depth, kWidth) * kPanel}, to + row * kKeys, kKeys, false);
    }
  }

  // to[rows, width] += tile · flat[keys, width], for what is seen.
  void times_keys(const Sequence& s, const Tile& t, const float* tile, const float* flat, int64_t width, float* to) const {
    for (int64_t row = 0; row < t.rows; row += kRows) {
      const int64_t depth = t.panel(s, row);
      if (depth == 0) continue;
      product(std::min(kRows, t.rows - row), width, depth, Left{tile + row * kKeys, kKeys, 1},
              Right{flat, width, kPanel}, to + row * width, width, true);
    }
  }

  // to[keys, width] += tile' · flat[rows, width], for what is seen.
  void times_queries(const Sequence& s, const Tile& t, const float* tile, const float* flat, int64_t width,
                     float* to) const {
    const int64_t keys = t.seen(s, t.rows - 1);
    int64_t row = 0;
    for (int64_t key = 0; key < keys; key += kRows) {
      while (t.seen(s, row) <= key) ++row;  // earlier rows do not see this key
      product(std::min(kRows, keys - key), width, t.rows - row, Left{tile + row * kKeys + key, 1, kKeys},
              Right{flat + row * width, width, kPanel}, to + key * width, width, true);
    }
  }

  // ---- a target and itself ----

  float self_score(const Sequence& s, int64_t query, int64_t head) const {
    const float* q = query_rows(s.first_query + query, head).data;
    const float* k = key_rows(s.first_key + s.place(query), head).data;
    double dot = 0;
    for (int64_t i = 0; i < D; ++i) dot += static_cast<double>(q[i]) * k[i];
    return static_cast<float>(dot) * scale + (add ? self_position() + self_time(s, query) : 0.0f);
  }

  float self_position() const { return by_position ? a.position[0] : 0.0f; }
  int64_t self_pair(const Sequence& s, int64_t query) const { return *starts(s, query) + s.num_history; }
  float self_time(const Sequence& s, int64_t query) const { return by_time ? time_bias(self_pair(s, query))[0] : 0.0f; }
};

}  // namespace nestpipe
