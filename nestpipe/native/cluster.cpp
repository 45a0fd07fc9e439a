// Which part each unit (a sample, or a group of samples that stay together) goes to: see pipeline/cluster.py.
//
// Greedy: a part takes, again and again, the unit that brings the least weight of keys it does not have yet, ties by
// number. What a unit would bring is kept up to date: when a part gets a key, all units with that key become cheaper.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t kFailed = -1;

// Lists of numbers, back to back: list i is values[offsets[i]] ... values[offsets[i + 1] - 1].
struct Lists {
  const int64_t* offsets;
  const int64_t* values;

  const int64_t* begin(int64_t i) const { return values + offsets[i]; }
  const int64_t* end(int64_t i) const { return values + offsets[i + 1]; }
  int64_t size(int64_t i) const { return offsets[i + 1] - offsets[i]; }
};

struct Greedy {
  Lists keys_of;  // unit -> its distinct keys
  Lists units_of;  // key -> the units that have it
  const int64_t* weights;  // of the keys
  const int64_t* unit_sizes;
  int64_t budget;
  std::vector<int64_t> left;  // units that have no part yet, ascending
  std::vector<int64_t> costs;  // of the units
  std::vector<int64_t> seen_in;  // keys: the last part that got it
  int64_t spent = 0;

  // Returns the number of samples that the part got.
  int64_t fill(int64_t part, int64_t target, int64_t* part_of) {
    for (int64_t unit : left) {
      costs[unit] = 0;
      for (const int64_t* key = keys_of.begin(unit); key != keys_of.end(unit); ++key) costs[unit] += weights[*key];
      spent += keys_of.size(unit);
    }
    int64_t size = 0;
    while (!left.empty()) {
      const int64_t place = cheapest();
      const int64_t unit = left[place], more = unit_sizes[unit];
      if (size + more - target >= target - size) break;
      left.erase(left.begin() + place);
      part_of[unit] = part;
      size += more;
      take_keys(part, unit);
    }
    return size;
  }

  int64_t cheapest() {
    if (spent >= budget) return 0;
    spent += static_cast<int64_t>(left.size());
    const auto cheaper = [this](int64_t one, int64_t other) { return costs[one] < costs[other]; };
    return std::min_element(left.begin(), left.end(), cheaper) - left.begin();  // the first of equal ones
  }

  void take_keys(int64_t part, int64_t unit) {
    if (spent >= budget) return;
    for (const int64_t* key = keys_of.begin(unit); key != keys_of.end(unit); ++key) {
      if (seen_in[*key] == part) continue;
      seen_in[*key] = part;
      spent += units_of.size(*key);
      for (const int64_t* other = units_of.begin(*key); other != units_of.end(*key); ++other) {
        costs[*other] -= weights[*key];
      }
    }
  }
};

void cluster(Greedy& greedy, const int64_t* sizes, int64_t num_parts, int64_t* part_of) {
  std::vector<int64_t> order{0};
  if (num_parts > 1) order.push_back(num_parts - 1);
  for (int64_t part = 1; part < num_parts - 1; ++part) order.push_back(part);
  int64_t missing = 0;  // in the middle so far
  for (uint64_t k = 0; k + 1 < order.size(); ++k) {
    const int64_t part = order[k];
    const bool is_middle = part > 0 && part < num_parts - 1;
    const int64_t target = sizes[part] + (is_middle ? missing : 0);
    const int64_t size = target > 0 ? greedy.fill(part, target, part_of) : 0;
    if (is_middle) missing = target - size;
  }
  for (int64_t unit : greedy.left) part_of[unit] = order.back();
}

}  // namespace

extern "C" {

// Units 0 .. num_units - 1 have the keys keys[offsets[u]] ..., all distinct and below num_keys. Writes the part of each
// unit and returns 0, or kFailed without memory.
int64_t nestpipe_cluster(const int64_t* offsets, const int64_t* keys, int64_t num_units, const int64_t* unit_sizes,
                         const int64_t* weights, int64_t num_keys, const int64_t* sizes, int64_t num_parts,
                         int64_t budget, int64_t* part_of) {
  try {
    const int64_t num_pairs = offsets[num_units];
    std::vector<int64_t> starts(num_keys + 1, 0), units(num_pairs);
    for (int64_t pair = 0; pair < num_pairs; ++pair) ++starts[keys[pair] + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t unit = 0; unit < num_units; ++unit) {
      for (int64_t pair = offsets[unit]; pair < offsets[unit + 1]; ++pair) units[next[keys[pair]]++] = unit;
    }
    Greedy greedy{{offsets, keys}, {starts.data(), units.data()}, weights, unit_sizes, budget, {}, {}, {}};
    greedy.left.resize(num_units);
    std::iota(greedy.left.begin(), greedy.left.end(), 0);
    greedy.costs.resize(num_units);
    greedy.seen_in.assign(num_keys, -1);
    cluster(greedy, sizes, num_parts, part_of);
    return 0;
  } catch (const std::exception&) {
    return kFailed;
  }
}

}  // extern "C"
