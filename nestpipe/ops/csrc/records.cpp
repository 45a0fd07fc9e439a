// Records: all columns of a row side by side in a file, with the row's slot in front.
//
//   record = slot (8 bytes) | row of column 0 | row of column 1 | ...
//
// Records lie anywhere in the file, so each is one read. A reader submits kDepth of them in one system call (io_uring): a
// quarter cheaper than one call each, and a disk serves them together. Where io_uring is not allowed or fails, it reads one
// after the other.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define NESTPIPE_RING 1
#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

constexpr int64_t kAhead = 8;
constexpr int64_t kLine = 64;
constexpr int64_t kMaxLines = 16;  // cache lines prefetched of a row; the hardware prefetcher does the rest
constexpr int64_t kHeader = sizeof(int64_t);

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
void prefetch(const nestpipe_record_rows& rows, int64_t i) {
  if (i >= rows.n) return;
  for (int64_t c = 0; c < rows.num_columns; ++c) {
    const nestpipe_record_column& column = rows.columns[c];
    const char* row = column.rows + rows.places[i] * column.row_bytes;
    const int64_t num_lines = std::min((column.row_bytes + kLine - 1) / kLine, kMaxLines);
    for (int64_t line = 0; line < num_lines; ++line) __builtin_prefetch(row + line * kLine, kWrite);
  }
}

bool fits(const nestpipe_record_rows& rows, int64_t i) { return rows.places[i] >= 0 && rows.places[i] < rows.num_rows; }

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

// Reads a whole record whatever it takes; false at an error or at the end of the file.
bool read_whole(int file, char* into, int64_t num_bytes, int64_t offset) {
  for (int64_t done = 0; done < num_bytes;) {
    const ssize_t got = pread(file, into + done, num_bytes - done, offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = 0;
    if (got <= 0) return false;
    done += got;
  }
  return true;
}

#ifdef NESTPIPE_RING

constexpr unsigned kDepth = 32;

struct Unmap {
  size_t num_bytes;
  void operator()(char* memory) const { munmap(memory, num_bytes); }
};
using Mapping = std::unique_ptr<char, Unmap>;

Mapping map_ring(int ring, size_t num_bytes, int64_t offset) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, offset);
  return Mapping(memory == MAP_FAILED ? nullptr : static_cast<char*>(memory), Unmap{num_bytes});
}

// Up to kDepth reads of one file at a time. Of one process: after a fork the child must not use it.
class Ring {
 public:
  Ring(int file, int64_t record_bytes) : stride_((record_bytes + kLine - 1) / kLine * kLine), buffer_(kDepth * stride_) {
    io_uring_params params{};
    ring_ = static_cast<int>(syscall(SYS_io_uring_setup, kDepth, &params));
    if (ring_ < 0) return;
    submit_ = map_ring(ring_, params.sq_off.array + params.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    done_ = map_ring(ring_, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
    entries_ = map_ring(ring_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    if (!submit_ || !done_ || !entries_ || syscall(SYS_io_uring_register, ring_, IORING_REGISTER_FILES, &file, 1) < 0) {
      close(ring_);
      ring_ = -1;
      return;
    }
    iovec whole{buffer_.data(), buffer_.size()};
    is_registered_ = syscall(SYS_io_uring_register, ring_, IORING_REGISTER_BUFFERS, &whole, 1) == 0;  // else a bit slower
    params_ = params;
  }
  Ring(const Ring&) = delete;
  ~Ring() {
    if (ring_ >= 0) close(ring_);
  }

  bool works() const { return ring_ >= 0 && owner_ == getpid(); }

  // Reads n <= kDepth records; calls found(i, bytes, result) for each of them, in any order. False if the ring fails: then
  // some may not have been found.
  template <typename Found>
  bool read(const int64_t* records, int64_t n, int64_t record_bytes, const Found& found) {
    unsigned& tail = at<unsigned>(submit_, params_.sq_off.tail);
    unsigned* order = &at<unsigned>(submit_, params_.sq_off.array);
    io_uring_sqe* entries = reinterpret_cast<io_uring_sqe*>(entries_.get());
    for (int64_t i = 0; i < n; ++i) {
      io_uring_sqe& entry = entries[i];
      std::memset(&entry, 0, sizeof(entry));
      entry.opcode = is_registered_ ? IORING_OP_READ_FIXED : IORING_OP_READ;
      entry.flags = IOSQE_FIXED_FILE;
      entry.addr = reinterpret_cast<uint64_t>(buffer_.data() + i * stride_);
      entry.len = static_cast<uint32_t>(record_bytes);
      entry.off = static_cast<uint64_t>(records[i] * record_bytes);
      entry.user_data = static_cast<uint64_t>(i);
      order[(tail + i) & (params_.sq_entries - 1)] = static_cast<unsigned>(i);
    }
    __atomic_store_n(&tail, tail + static_cast<unsigned>(n), __ATOMIC_RELEASE);
    int64_t num_submitted = 0, num_found = 0;
    unsigned& head = at<unsigned>(done_, params_.cq_off.head);
    const io_uring_cqe* results = &at<io_uring_cqe>(done_, params_.cq_off.cqes);
    while (num_found < n) {
      const int64_t more = n - num_submitted;
      const long entered = syscall(SYS_io_uring_enter, ring_, more, n - num_found, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (entered < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        owner_ = -1;  // reads may still arrive in the buffer: never used again
        return false;
      }
      if (entered > 0) num_submitted += entered;
      const unsigned end = __atomic_load_n(&at<unsigned>(done_, params_.cq_off.tail), __ATOMIC_ACQUIRE);
      for (; head != end; __atomic_store_n(&head, head + 1, __ATOMIC_RELEASE), ++num_found) {
        const io_uring_cqe& result = results[head & (params_.cq_entries - 1)];
        found(static_cast<int64_t>(result.user_data), buffer_.data() + result.user_data * stride_, int64_t{result.res});
      }
    }
    return true;
  }

 private:
  template <typename T>
  static T& at(const Mapping& memory, uint32_t offset) {
    return *reinterpret_cast<T*>(memory.get() + offset);
  }

  int64_t stride_;
  std::vector<char> buffer_;
  int ring_ = -1;
  Mapping submit_{nullptr, Unmap{0}}, done_{nullptr, Unmap{0}}, entries_{nullptr, Unmap{0}};
  bool is_registered_ = false;
  io_uring_params params_{};
  pid_t owner_ = getpid();
};

#endif

struct Reader {
  Reader(int file, int64_t record_bytes)
      : file(file),
        record(record_bytes)
#ifdef NESTPIPE_RING
        ,
        ring(file, record_bytes)
#endif
  {
  }

  int file;
  std::vector<char> record;
#ifdef NESTPIPE_RING
  Ring ring;
#endif
};

// Reads one record into its row; *error as in nestpipe_records_read.
bool read_row(Reader& reader, const nestpipe_record_rows& rows, int64_t i, int64_t number, int64_t* error) {
  errno = 0;
  if (!read_whole(reader.file, reader.record.data(), rows.record_bytes, number * rows.record_bytes)) {
    return *error = errno, false;
  }
  return unpack(rows, i, reader.record.data()) || (*error = -1, false);
}

}  // namespace

extern "C" {

// out [n, record_bytes] = the records of rows. Returns n, or the first place that does not exist; then nothing is written.
int64_t nestpipe_records_pack(const nestpipe_record_rows* call, char* out) {
  const nestpipe_record_rows& rows = *call;
  for (int64_t i = 0; i < rows.n; ++i) {
    if (!fits(rows, i)) return i;
  }
  for (int64_t i = 0; i < rows.n; ++i) {
    prefetch<0>(rows, i + kAhead);
    char* record = out + i * rows.record_bytes;
    std::memcpy(record, &rows.slots[i], kHeader);
    for (int64_t c = 0; c < rows.num_columns; ++c) {
      const nestpipe_record_column& column = rows.columns[c];
      std::memcpy(record + column.offset, column.rows + rows.places[i] * column.row_bytes, column.row_bytes);
    }
  }
  return rows.n;
}

// Makes records first, first + 1, ... the newest of distinct slots [n], or none at all if first is negative; live [segment]
// counts the newest records. Returns n, or the place of the first slot that does not exist; then nothing has changed.
int64_t nestpipe_records_assign(int32_t* records, int64_t num_slots, const int64_t* slots, int64_t n, int64_t first,
                                int64_t* live, int64_t segment_rows) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || slots[i] >= num_slots) return i;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(records + slots[i + kAhead], 1);
    int32_t& record = records[slots[i]];
    if (record >= 0) --live[record / segment_rows];
    record = first < 0 ? -1 : static_cast<int32_t>(first + i);
    if (record >= 0) ++live[record / segment_rows];
  }
  return n;
}

// A reader of a file; null without memory.
void* nestpipe_reader_create(int32_t file, int64_t record_bytes) {
  try {
    return new Reader(file, record_bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void nestpipe_reader_destroy(void* reader) { delete static_cast<Reader*>(reader); }

// Whether the reader submits many reads at once.
int64_t nestpipe_reader_is_batched(void* handle) {
#ifdef NESTPIPE_RING
  return static_cast<Reader*>(handle)->ring.works();
#else
  return 0;
#endif
}

// Reads records [n], numbers in the file, into rows; columns may be some of a record's. Returns n, or the place of one that
// cannot be read, with *error = errno, 0 at the end of the file, -1 if the record belongs to another slot, -2 if the
// place does not exist. Not for several threads at once.
int64_t nestpipe_records_read(void* handle, const nestpipe_record_rows* call, const int64_t* records, int64_t is_batched,
                              int64_t* error) {
  Reader& reader = *static_cast<Reader*>(handle);
  const nestpipe_record_rows& rows = *call;
  for (int64_t i = 0; i < rows.n; ++i) {
    if (!fits(rows, i)) return *error = -2, i;
  }
  int64_t begin = 0;
#ifdef NESTPIPE_RING
  std::vector<int64_t> again;
  while (begin < rows.n && is_batched != 0 && reader.ring.works()) {
    const int64_t n = std::min<int64_t>(kDepth, rows.n - begin);
    for (int64_t i = begin; i < begin + n; ++i) prefetch<1>(rows, i);
    int64_t wrong = -1;
    const auto found = [&](int64_t i, const char* record, int64_t result) {
      if (result != rows.record_bytes) {
        again.push_back(begin + i);
      } else if (!unpack(rows, begin + i, record)) {
        wrong = begin + i;
      }
    };
    if (!reader.ring.read(records + begin, n, rows.record_bytes, found)) break;
    if (wrong >= 0) return *error = -1, wrong;
    begin += n;
  }
  for (int64_t i : again) {
    if (!read_row(reader, rows, i, records[i], error)) return i;
  }
#endif
  for (int64_t i = begin; i < rows.n; ++i) {
    prefetch<1>(rows, i + 1);
    if (!read_row(reader, rows, i, records[i], error)) return i;
  }
  return rows.n;
}

}  // extern "C"
