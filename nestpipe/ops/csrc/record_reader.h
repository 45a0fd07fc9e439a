// Reads records of equal size from a file that grows in segments.
//
//   segment of segment_bytes = segment_rows records | unused bytes
//
// Three ways, fastest first:
//
//   mapped   records are copied from a mapping of the file, without a system call: a seventh of the cost of a read. Only
//            where the system still caches them: one that is not cached would be waited for alone.
//   ring     kDepth reads in one system call (io_uring), so that a disk serves them together.
//   each     one read after the other, where io_uring is not allowed or fails.

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__)
#define NESTPIPE_MAPPED 1
#if __has_include(<linux/io_uring.h>)
#define NESTPIPE_RING 1
#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#endif
#endif

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace nestpipe {

constexpr int64_t kLine = 64;

struct Unmap {
  size_t num_bytes;
  void operator()(char* memory) const { munmap(memory, num_bytes); }
};
using Mapping = std::unique_ptr<char, Unmap>;

inline Mapping map(int file, size_t num_bytes, int protection, int flags, int64_t offset) {
  void* memory = mmap(nullptr, num_bytes, protection, flags, file, offset);
  return Mapping(memory == MAP_FAILED ? nullptr : static_cast<char*>(memory), Unmap{num_bytes});
}

struct Layout {
  int64_t record_bytes, segment_rows, segment_bytes;

  int64_t offset(int64_t record) const {  // record numbers fit into 31 bits, whose division is fast
    const uint32_t number = static_cast<uint32_t>(record), rows = static_cast<uint32_t>(segment_rows);
    return int64_t{number / rows} * segment_bytes + int64_t{number % rows} * record_bytes;
  }
};

// Reads num_bytes whatever it takes; false at an error or, with errno 0, at the end of the file.
inline bool read_whole(int file, char* into, int64_t num_bytes, int64_t offset) {
  for (int64_t done = 0; done < num_bytes;) {
    const ssize_t got = pread(file, into + done, num_bytes - done, offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = 0;
    if (got <= 0) return false;
    done += got;
  }
  return true;
}

#ifdef NESTPIPE_MAPPED

// The file in memory, as far as the system caches it.
class MappedFile {
 public:
  MappedFile(int file, const Layout& layout) : file_(file), layout_(layout) {}

  // Whether the records [n] exist and are cached, by a sample of them.
  bool has(const int64_t* records, int64_t n) {
    if (n == 0) return true;
    if (!cover()) return false;
    if (layout_.offset(*std::max_element(records, records + n)) + layout_.record_bytes > file_bytes_) return false;
    for (int64_t i = 0; i < n; i += std::max<int64_t>(n / kSample, 1)) {
      if (!is_cached(layout_.offset(records[i]), layout_.record_bytes)) return false;
    }
    return true;
  }

  const char* at(int64_t record) const { return memory_.get() + layout_.offset(record); }

 private:
  static constexpr int64_t kSample = 32;

  // Maps all of the file, and as much again for what will be written; false if the system refuses.
  bool cover() {
    struct stat status;
    if (refused_ || fstat(file_, &status) < 0) return false;
    file_bytes_ = status.st_size;
    if (file_bytes_ <= mapped_bytes_) return mapped_bytes_ > 0;
    memory_.reset();
    mapped_bytes_ = 2 * file_bytes_;
    memory_ = map(file_, mapped_bytes_, PROT_READ, MAP_SHARED | MAP_NORESERVE, 0);
    refused_ = memory_ == nullptr;
    if (!refused_) madvise(memory_.get(), mapped_bytes_, MADV_RANDOM);  // neighbours of a record are not needed
    return !refused_;
  }

  bool is_cached(int64_t offset, int64_t num_bytes) const {
    const int64_t page = sysconf(_SC_PAGESIZE), begin = offset / page * page;
    const int64_t num_pages = (offset + num_bytes - begin + page - 1) / page;
    unsigned char pages[kMaxPages];
    if (num_pages > kMaxPages || mincore(memory_.get() + begin, num_pages * page, pages) < 0) return false;
    return std::all_of(pages, pages + num_pages, [](unsigned char one) { return one & 1; });
  }

  static constexpr int64_t kMaxPages = 64;  // of a record; larger ones lose nothing by a system call
  int file_;
  Layout layout_;
  int64_t file_bytes_ = 0, mapped_bytes_ = 0;
  Mapping memory_{nullptr, Unmap{0}};
  bool refused_ = false;
};

#endif

#ifdef NESTPIPE_RING

constexpr unsigned kDepth = 32;

inline Mapping map_ring(int ring, size_t num_bytes, int64_t offset) {
  return map(ring, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, offset);
}

// Up to kDepth reads of one file at a time. Of one process: after a fork the child must not use it.
class Ring {
 public:
  Ring(int file, const Layout& layout)
      : layout_(layout), stride_((layout.record_bytes + kLine - 1) / kLine * kLine), buffer_(kDepth * stride_) {
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
  bool read(const int64_t* records, int64_t n, const Found& found) {
    unsigned& tail = at<unsigned>(submit_, params_.sq_off.tail);
    unsigned* order = &at<unsigned>(submit_, params_.sq_off.array);
    io_uring_sqe* entries = reinterpret_cast<io_uring_sqe*>(entries_.get());
    for (int64_t i = 0; i < n; ++i) {
      io_uring_sqe& entry = entries[i];
      std::memset(&entry, 0, sizeof(entry));
      entry.opcode = is_registered_ ? IORING_OP_READ_FIXED : IORING_OP_READ;
      entry.flags = IOSQE_FIXED_FILE;
      entry.addr = reinterpret_cast<uint64_t>(buffer_.data() + i * stride_);
      entry.len = static_cast<uint32_t>(layout_.record_bytes);
      entry.off = static_cast<uint64_t>(layout_.offset(records[i]));
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

  Layout layout_;
  int64_t stride_;
  std::vector<char> buffer_;
  int ring_ = -1;
  Mapping submit_{nullptr, Unmap{0}}, done_{nullptr, Unmap{0}}, entries_{nullptr, Unmap{0}};
  bool is_registered_ = false;
  io_uring_params params_{};
  pid_t owner_ = getpid();
};

#endif

}  // namespace nestpipe
