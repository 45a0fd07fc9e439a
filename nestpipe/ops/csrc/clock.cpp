// The positions of a row buffer: which slot has which, who holds it, which is taken next. See position_clock.py.
//
// Lookups are bound by memory latency, so loops prefetch the entry kAhead ahead. A function that takes slots or positions
// returns kWrong if one does not exist; then nothing has changed.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kAhead = 16;
constexpr int64_t kWrong = -1;
constexpr uint8_t kMostUses = 255;

}  // namespace

extern "C" {

struct nestpipe_clock {
  const int32_t* positions;  // [num_slots], negative for a slot without one
  uint8_t* uses;  // [num_slots]
  int64_t num_slots;
  const int32_t* slots;  // [num_positions], negative for a position without one
  int16_t* holders;  // [num_positions]
  int64_t num_positions;
};

// Counts a use of distinct slots [n] and holds their positions. Writes positions [n], and to missing the places of slots
// without one; counts = {number of these, number of positions that nobody held before}.
int64_t nestpipe_clock_hold(const nestpipe_clock* clock, const int64_t* slots, int64_t n, int64_t* positions,
                            int64_t* missing, int64_t* counts) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || slots[i] >= clock->num_slots) return kWrong;
  }
  int64_t num_missing = 0, num_new = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      __builtin_prefetch(clock->positions + slots[i + kAhead]);
      __builtin_prefetch(clock->uses + slots[i + kAhead], 1);
    }
    uint8_t& uses = clock->uses[slots[i]];
    if (uses < kMostUses) ++uses;
    const int32_t position = clock->positions[slots[i]];
    positions[i] = position;
    if (position < 0) {
      missing[num_missing++] = i;
    } else {
      num_new += clock->holders[position]++ == 0;
    }
  }
  counts[0] = num_missing, counts[1] = num_new;
  return n;
}

// Ends the hold of positions [n]; negative ones are skipped. Returns how many nobody holds any more.
int64_t nestpipe_clock_release(const nestpipe_clock* clock, const int64_t* positions, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (positions[i] >= clock->num_positions) return kWrong;
  }
  int64_t num_free = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (positions[i] >= 0) num_free += --clock->holders[positions[i]] == 0;
  }
  return num_free;
}

// Positions from begin to end that nobody holds and whose slot was used at most so often, up to `wanted`; holds each of them.
// Writes where to go on to *next and returns their number.
int64_t nestpipe_clock_take(const nestpipe_clock* clock, int64_t begin, int64_t end, int64_t most_uses, int64_t wanted,
                            int64_t* taken, int64_t* next) {
  int64_t num_taken = 0, position = begin;
  for (; position < end && num_taken < wanted; ++position) {
    if (position + kAhead < end) __builtin_prefetch(clock->uses + std::max(clock->slots[position + kAhead], 0));
    const int32_t slot = clock->slots[position];
    if (clock->holders[position] != 0 || (slot >= 0 && clock->uses[slot] > most_uses)) continue;
    clock->holders[position] = 1;
    taken[num_taken++] = position;
  }
  *next = position;
  return num_taken;
}

}  // extern "C"
