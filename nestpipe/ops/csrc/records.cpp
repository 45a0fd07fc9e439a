// Records: all columns of a row side by side in a file, with the row's slot in front.
//
//   record = slot (8 bytes) | row of column 0 | row of column 1 | ...
//
// Records lie anywhere in the file, and rows anywhere in their columns, so loops prefetch both.

#include <new>

#include "record_reader.h"

using nestpipe::kLine;
using nestpipe::Layout;

namespace {

constexpr int64_t kAhead = 6;
constexpr int64_t kAheadSlots = 16;
constexpr int64_t kMaxLines = 16;  // cache lines prefetched of a row; the hardware prefetcher does the rest
constexpr int64_t kHeader = sizeof(int64_t);

enum How { kEach = 0, kRing = 1, kMapped = 2 };  // the fastest way that may be used
enum Error { kEnd = 0, kOtherSlot = -1, kNoPlace = -2 };  // or errno

}  // namespace

extern "C" {

struct nestpipe_record_column {
  char* rows;  // [num_rows, row_bytes]
  int64_t row_bytes;
  int64_t offset;  // in a record
};

// Rows at places of columns, and the slots that stand in their records.
struct nestpipe_record_rows {
  const nestpipe_record_column* columns;
  int64_t num_columns;
  int64_t num_rows;  // of each column
  const int64_t* places;  // [n], distinct
  const int64_t* slots;  // [n]
  int64_t n;
  int64_t record_bytes;
};

}  // extern "C"

namespace {

template <int kWrite>
void prefetch(const char* begin, int64_t num_bytes) {
  const int64_t num_lines = std::min((num_bytes + kLine - 1) / kLine, kMaxLines);
  for (int64_t line = 0; line < num_lines; ++line) __builtin_prefetch(begin + line * kLine, kWrite);
}

template <int kWrite>
void prefetch_row(const nestpipe_record_rows& rows, int64_t i) {
  if (i >= rows.n) return;
  for (int64_t c = 0; c < rows.num_columns; ++c) {
    const nestpipe_record_column& column = rows.columns[c];
    prefetch<kWrite>(column.rows + rows.places[i] * column.row_bytes, column.row_bytes);
  }
}

// The first place that does not exist; n if all do.
int64_t first_wrong(const nestpipe_record_rows& rows) {
  int64_t i = 0;
  while (i < rows.n && rows.places[i] >= 0 && rows.places[i] < rows.num_rows) ++i;
  return i;
}

void pack(const nestpipe_record_rows& rows, int64_t i, int64_t slot, char* record) {
  std::memcpy(record, &slot, kHeader);
  for (int64_t c = 0; c < rows.num_columns; ++c) {
    const nestpipe_record_column& column = rows.columns[c];
    std::memcpy(record + column.offset, column.rows + rows.places[i] * column.row_bytes, column.row_bytes);
  }
}

// Copies a record into its row; false if it belongs to another slot.
bool unpack(const nestpipe_record_rows& rows, int64_t i, const char* record) {
  int64_t slot;
  std::memcpy(&slot, record, kHeader);
  if (slot != rows.slots[i]) return false;
  for (int64_t c = 0; c < rows.num_columns; ++c) {
    const nestpipe_record_column& column = rows.columns[c];
    std::memcpy(column.rows + rows.places[i] * column.row_bytes, record + column.offset, column.row_bytes);
  }
  return true;
}

struct Reader {
  Reader(int file, const Layout& layout)
      : file(file),
        layout(layout),
        record(layout.record_bytes)
#ifdef NESTPIPE_MAPPED
        ,
        mapped(file, layout)
#endif
#ifdef NESTPIPE_RING
        ,
        ring(file, layout)
#endif
  {
  }

  bool is_mapped(const int64_t* records, int64_t n, int64_t how) {
#ifdef NESTPIPE_MAPPED
    return how >= kMapped && mapped.has(records, n);
#else
    return false;
#endif
  }

  const char* at(int64_t number) const {
#ifdef NESTPIPE_MAPPED
    return mapped.at(number);
#else
    return nullptr;
#endif
  }

  int file;
  Layout layout;
  std::vector<char> record;
#ifdef NESTPIPE_MAPPED
  nestpipe::MappedFile mapped;
#endif
#ifdef NESTPIPE_RING
  nestpipe::Ring ring;
#endif
};

// Reads one record into its row; *error as in nestpipe_records_read.
bool read_row(Reader& reader, const nestpipe_record_rows& rows, int64_t i, int64_t number, int64_t* error) {
  errno = 0;
  if (!nestpipe::read_whole(reader.file, reader.record.data(), rows.record_bytes, reader.layout.offset(number))) {
    return *error = errno, false;
  }
  return unpack(rows, i, reader.record.data()) || (*error = kOtherSlot, false);
}

// Copies records from the mapping into rows, each after before(i). Returns n, or the first of another slot.
template <typename Before>
int64_t read_mapped(const Reader& reader, const nestpipe_record_rows& rows, const int64_t* records, const Before& before) {
  for (int64_t i = 0; i < rows.n; ++i) {
    prefetch_row<1>(rows, i + kAhead);
    if (i + kAhead < rows.n) prefetch<0>(reader.at(records[i + kAhead]), rows.record_bytes);
    before(i);
    if (!unpack(rows, i, reader.at(records[i]))) return i;
  }
  return rows.n;
}

int64_t read_by_calls(Reader& reader, const nestpipe_record_rows& rows, const int64_t* records, int64_t how,
                      int64_t* error) {
  int64_t begin = 0;
#ifdef NESTPIPE_RING
  std::vector<int64_t> again;
  while (begin < rows.n && how >= kRing && reader.ring.works()) {
    const int64_t n = std::min<int64_t>(nestpipe::kDepth, rows.n - begin);
    for (int64_t i = begin; i < begin + n; ++i) prefetch_row<1>(rows, i);
    int64_t wrong = -1;
    const auto found = [&](int64_t i, const char* record, int64_t result) {
      if (result != rows.record_bytes) {
        again.push_back(begin + i);
      } else if (!unpack(rows, begin + i, record)) {
        wrong = begin + i;
      }
    };
    if (!reader.ring.read(records + begin, n, found)) break;
    if (wrong >= 0) return *error = kOtherSlot, wrong;
    begin += n;
  }
  for (int64_t i : again) {
    if (!read_row(reader, rows, i, records[i], error)) return i;
  }
#endif
  for (int64_t i = begin; i < rows.n; ++i) {
    prefetch_row<1>(rows, i + 1);
    if (!read_row(reader, rows, i, records[i], error)) return i;
  }
  return rows.n;
}

}  // namespace

extern "C" {

// out [n, record_bytes] = the records of rows. Returns n, or the first place that does not exist; then nothing is written.
int64_t nestpipe_records_pack(const nestpipe_record_rows* rows, char* out) {
  const int64_t wrong = first_wrong(*rows);
  if (wrong < rows->n) return wrong;
  for (int64_t i = 0; i < rows->n; ++i) {
    prefetch_row<0>(*rows, i + kAhead);
    pack(*rows, i, rows->slots[i], out + i * rows->record_bytes);
  }
  return rows->n;
}

// Makes records first, first + 1, ... the newest of distinct slots [n], or none at all if first is negative; live [segment]
// counts the newest records. Returns n, or the place of the first slot that does not exist; then nothing has changed.
int64_t nestpipe_records_assign(int32_t* records, int64_t num_slots, const int64_t* slots, int64_t n, int64_t first,
                                int64_t* live, int64_t segment_rows) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || slots[i] >= num_slots) return i;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAheadSlots < n) __builtin_prefetch(records + slots[i + kAheadSlots], 1);
    int32_t& record = records[slots[i]];
    if (record >= 0) --live[static_cast<uint32_t>(record) / static_cast<uint32_t>(segment_rows)];
    record = first < 0 ? -1 : static_cast<int32_t>(first + i);
    if (record >= 0) ++live[record / segment_rows];
  }
  return n;
}

// A reader of a file; null without memory.
void* nestpipe_reader_create(int32_t file, int64_t record_bytes, int64_t segment_rows, int64_t segment_bytes) {
  try {
    return new Reader(file, Layout{record_bytes, segment_rows, segment_bytes});
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void nestpipe_reader_destroy(void* reader) { delete static_cast<Reader*>(reader); }

// Reads records [n], numbers in the file, into rows; columns may be some of a record's. Returns n, or the place of one that
// cannot be read, with *error = errno, or one of Error. Not for several threads at once.
int64_t nestpipe_records_read(void* handle, const nestpipe_record_rows* rows, const int64_t* records, int64_t how,
                              int64_t* error) {
  Reader& reader = *static_cast<Reader*>(handle);
  const int64_t wrong = first_wrong(*rows);
  if (wrong < rows->n) return *error = kNoPlace, wrong;
  if (!reader.is_mapped(records, rows->n, how)) return read_by_calls(reader, *rows, records, how, error);
  return *error = kOtherSlot, read_mapped(reader, *rows, records, [](int64_t) {});
}

// Packs the rows at places whose `leaving` slot [n] is not negative to out, in their order, then reads records into
// all places as nestpipe_records_read does. Row by row if records are mapped: a row is in the cache when it is overwritten.
int64_t nestpipe_records_exchange(void* handle, const nestpipe_record_rows* rows, const int64_t* records,
                                  const int64_t* leaving, char* out, int64_t how, int64_t* error) {
  Reader& reader = *static_cast<Reader*>(handle);
  const int64_t wrong = first_wrong(*rows);
  if (wrong < rows->n) return *error = kNoPlace, wrong;
  const auto leave = [&](int64_t i) {
    if (leaving[i] < 0) return;
    pack(*rows, i, leaving[i], out);
    out += rows->record_bytes;
  };
  if (reader.is_mapped(records, rows->n, how)) return *error = kOtherSlot, read_mapped(reader, *rows, records, leave);
  for (int64_t i = 0; i < rows->n; ++i) {
    prefetch_row<0>(*rows, i + kAhead);
    leave(i);
  }
  return read_by_calls(reader, *rows, records, how, error);
}

// Copies those of n consecutive records of a segment that are the newest of their slots to out [n, record_bytes], and
// their slots to live [n]. Returns their number, or -1 if they cannot be read, with *error as above.
int64_t nestpipe_records_live(void* handle, int64_t first, int64_t n, const int32_t* newest, int64_t num_slots, char* out,
                              int64_t* live, int64_t how, int64_t* error) {
  Reader& reader = *static_cast<Reader*>(handle);
  const int64_t ends[] = {first, first + n - 1}, record_bytes = reader.layout.record_bytes;
  const char* source = out;
  if (reader.is_mapped(ends, 2, how)) {
    source = reader.at(first);
  } else if (errno = 0; !nestpipe::read_whole(reader.file, out, n * record_bytes, reader.layout.offset(first))) {
    return *error = errno, -1;
  }
  std::vector<int64_t> slots(n);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(&slots[i], source + i * record_bytes, kHeader);
    if (slots[i] < 0 || slots[i] >= num_slots) return *error = kOtherSlot, -1;
  }
  int64_t num_live = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAheadSlots < n) __builtin_prefetch(newest + slots[i + kAheadSlots]);
    if (newest[slots[i]] != first + i) continue;
    std::memmove(out + num_live * record_bytes, source + i * record_bytes, record_bytes);
    live[num_live++] = slots[i];
  }
  return num_live;
}

}  // extern "C"
