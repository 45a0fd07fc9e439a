// Operators: shapes come from torch's meta kernels, values from the CPU's kernels, run later on the stream's thread.
//
// An operator whose result the host needs (a number, a shape that depends on values) synchronises and is counted.
#include "device.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <atomic>
#include <map>

namespace fake {
namespace {

using at::IValue;
using at::Tensor;
using Stack = torch::jit::Stack;

std::atomic<long> num_kernels{0}, num_uploads{0}, num_unpinned_uploads{0}, num_downloads{0};

bool on_device(const Tensor& one) { return one.defined() && one.device().type() == kDeviceType; }

// A device tensor as a launch sees it: an address without ownership, so a freed tensor is really gone.
struct View {
  const char* address;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;

  explicit View(const Tensor& one)
      : address(nullptr), sizes(one.sizes().vec()), strides(one.strides().vec()), type(one.scalar_type()) {
    auto* base = static_cast<const char*>(one.unsafeGetTensorImpl()->storage().data_ptr().get());
    if (base) address = base + one.storage_offset() * one.element_size();
  }

  size_t itemsize() const { return c10::elementSize(type); }
  // Bytes from the first to the last element, of the whole or of one row.
  size_t extent(size_t first_dim = 0) const {
    int64_t last = 0;
    for (size_t dim = first_dim; dim < sizes.size(); dim++) {
      if (!sizes[dim]) return 0;
      last += (sizes[dim] - 1) * strides[dim];
    }
    return address ? (last + 1) * itemsize() : 0;
  }
  Tensor on_host() const {
    static char none[64];
    return at::from_blob(address ? host_view(address) : none, sizes, strides, at::TensorOptions().dtype(type));
  }
};

template <class Function>
IValue map_tensors(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> found;
    for (const Tensor& one : value.toTensorVector()) found.push_back(function(one));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> found;
    for (const auto& one : value.toOptionalTensorList().vec())
      found.push_back(one ? std::optional<Tensor>(function(*one)) : std::nullopt);
    return found;
  }
  return value;
}

// The arguments of one call, with views instead of device tensors.
struct Call {
  c10::OperatorHandle op;
  std::string name;
  std::vector<IValue> arguments;       // host tensors and numbers; device tensors are replaced by `views`
  std::vector<View> views;             // device tensors in order of appearance
  std::vector<bool> writes;            // per view
  std::vector<std::vector<int>> view_of;  // [argument][tensor]: number of the view, -1 for a host tensor

  Call(const c10::OperatorHandle& handle, const std::vector<IValue>& given)
      : op(handle), name(handle.schema().name()) {
    for (size_t i = 0; i < given.size(); i++) {
      auto* alias = handle.schema().arguments()[i].alias_info();
      bool is_written = alias && alias->isWrite();
      auto& own = view_of.emplace_back();
      arguments.push_back(map_tensors(given[i], [&](const Tensor& one) {
        own.push_back(on_device(one) ? int(views.size()) : -1);
        if (!on_device(one)) return one;
        views.emplace_back(one);
        writes.push_back(is_written);
        return Tensor();
      }));
      if (arguments.back().isDevice()) arguments.back() = IValue(c10::Device(c10::kCPU));
    }
  }

  Stack run_on_host() const {
    Stack stack;
    for (size_t i = 0; i < arguments.size(); i++) {
      size_t place = 0;
      stack.push_back(map_tensors(arguments[i], [&](const Tensor& one) {
        int own = view_of[i][place++];
        return own < 0 ? one : views[own].on_host();
      }));
    }
    op.callBoxed(&stack);
    return stack;
  }

  // Records what the call touches; indexed operators touch only the rows of their index.
  void touch_arguments(const LaunchPtr& own) const {
    bool is_indexed = touches_rows();
    for (size_t i = 0; i < views.size(); i++)
      if (is_indexed && (i == 0 || is_in_place(i)))
        touch_rows(own, views[i], views[1].on_host(), writes[i]);
      else
        touch(own, views[i].address, views[i].extent(), writes[i]);
  }

 private:
  // Whether of the first view only the rows in the second one are touched.
  bool touches_rows() const {
    static const std::set<std::string> readers{"aten::index_select"}, writers{"aten::index_copy", "aten::index_add",
                                                                              "aten::index_fill"};
    if (views.size() < 2 || views[0].sizes.empty() ||
        size_t(views[0].strides[0]) * views[0].itemsize() < views[0].extent(1))
      return false;
    if (name == "aten::embedding") return true;
    if (arguments.size() < 3 || !arguments[1].isInt() || arguments[1].toInt() != 0) return false;
    auto plain = name.back() == '_' ? name.substr(0, name.size() - 1) : name;
    // Writers in place arrive as calls whose `out` is their first argument.
    return readers.count(plain) || (writers.count(plain) && (writes[0] || is_in_place(views.size() - 1)));
  }

  bool is_in_place(size_t number) const {
    return number > 1 && writes[number] && views[number].address == views[0].address &&
           views[number].sizes == views[0].sizes;
  }

  static void touch_rows(const LaunchPtr& own, const View& view, const Tensor& index, bool writes) {
    auto flat = index.reshape({-1}).to(at::kLong).contiguous();
    std::set<int64_t> rows(flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel());
    auto stride = view.strides[0] * int64_t(view.itemsize());
    for (auto row = rows.begin(); row != rows.end();) {
      auto first = *row, last = first;
      for (++row; row != rows.end() && *row == last + 1; ++row) last = *row;
      touch(own, view.address + first * stride, (last - first) * stride + view.extent(1), writes);
    }
  }
};

void check_devices(const std::string& name, const std::vector<IValue>& arguments) {
  bool has_device = false;
  std::string host;
  for (auto& argument : arguments)
    map_tensors(argument, [&](const Tensor& one) {
      if (on_device(one)) has_device = true;
      if (one.defined() && one.device().is_cpu() && one.dim() > 0) host = std::to_string(one.numel());
      return one;
    });
  TORCH_CHECK(!has_device || host.empty(), "fake device: expected all tensors to be on the same device, but ", name,
              " got device tensors and a host tensor of ", host, " values");
}

// The written argument that a return value is, or -1 for a new tensor.
int written_argument(const c10::FunctionSchema& schema, size_t number) {
  auto* own = schema.returns()[number].alias_info();
  if (!own || !own->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && alias->beforeSet() == own->beforeSet()) return int(i);
  }
  return -1;
}

// The results of a call on meta tensors, or nothing if shapes depend on values.
std::optional<Stack> meta_results(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  for (auto& one : op.schema().returns())
    if (one.type()->kind() != c10::TypeKind::TensorType && one.type()->kind() != c10::TypeKind::ListType)
      return std::nullopt;
  Stack stack;
  for (auto& argument : arguments) {
    auto own = map_tensors(argument, [](const Tensor& one) {
      return on_device(one) ? at::empty_strided(one.sizes(), one.strides(), one.options().device(c10::kMeta)) : one;
    });
    stack.push_back(own.isDevice() ? IValue(c10::Device(c10::kMeta)) : own);
  }
  try {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

Tensor new_like(const Tensor& one) {
  return one.defined() ? at::empty_strided(one.sizes(), one.strides(), one.options().device(device())) : Tensor();
}

void copy_results(const LaunchPtr& own, const std::vector<std::vector<View>>& targets, const Stack& results) {
  for (size_t r = 0; r < targets.size(); r++)
    for (size_t i = 0; i < targets[r].size(); i++) {
      auto& target = targets[r][i];
      touch(own, target.address, target.extent(), true);
      target.on_host().copy_(results[r].isTensor() ? results[r].toTensor() : results[r].toTensorVector()[i]);
    }
}

void queue_call(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const Stack& shapes,
                Stack* stack) {
  std::vector<IValue> results;
  std::vector<std::vector<View>> targets;
  for (size_t r = 0; r < shapes.size(); r++) {
    auto& own = targets.emplace_back();
    if (int written = written_argument(op.schema(), r); written >= 0) {
      if (shapes[r].isTensor() && arguments[written].isTensor()) {
        auto& out = arguments[written].toTensor();
        if (on_device(out) && out.sizes() != shapes[r].toTensor().sizes()) out.resize_(shapes[r].toTensor().sizes());
      }
      results.push_back(arguments[written]);
      continue;
    }
    results.push_back(map_tensors(shapes[r], [&](const Tensor& one) {
      auto found = new_like(one);
      if (found.defined()) own.emplace_back(found);
      return found;
    }));
  }
  num_kernels++;
  auto call = std::make_shared<Call>(op, arguments);
  launch(current_stream(), call->name, [call, targets](const LaunchPtr& own) {
    call->touch_arguments(own);
    copy_results(own, targets, call->run_on_host());
  });
  for (auto& one : results) stack->push_back(one);
}

// For operators whose result the host needs.
void call_now(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, Stack* stack) {
  auto call = std::make_shared<Call>(op, arguments);
  auto found = std::make_shared<Stack>();
  launch(current_stream(), call->name, [call, found](const LaunchPtr& own) {
    call->touch_arguments(own);
    *found = call->run_on_host();
  });
  synchronize(current_stream(), call->name);
  for (size_t r = 0; r < found->size(); r++) {
    int written = written_argument(op.schema(), r);
    if (written >= 0) {
      stack->push_back(arguments[written]);
      continue;
    }
    stack->push_back(map_tensors((*found)[r], [](const Tensor& one) {
      if (!one.defined()) return one;
      auto result = new_like(one);
      launch(current_stream(), "result", [target = View(result), one](const LaunchPtr& own) {
        touch(own, target.address, target.extent(), true);
        target.on_host().copy_(one);
      });
      return result;
    }));
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  size_t num = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - num, stack->end());
  torch::jit::drop(*stack, num);
  check_devices(op.schema().name(), arguments);
  if (auto shapes = meta_results(op, arguments))
    queue_call(op, arguments, *shapes, stack);
  else
    call_now(op, arguments, stack);
}

void upload(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool stays = non_blocking && is_pinned(source.data_ptr());
  (stays ? num_uploads : num_unpinned_uploads)++;
  Tensor host = stays ? source.detach() : source.detach().clone();  // a pinned source is read when the copy runs
  auto then = stays ? host.clone() : Tensor();
  launch(current_stream(), "upload", [host, then, own_target = View(target)](const LaunchPtr& own) {
    touch(own, own_target.address, own_target.extent(), true);
    // As bytes: nan is not equal to itself.
    if (then.defined() && memcmp(host.contiguous().data_ptr(), then.contiguous().data_ptr(), then.nbytes()))
      report("the host changed a pinned tensor before its " + own->what + " (number " + std::to_string(own->number) +
             " on stream " + std::to_string(own->stream) + ") had read it");
    own_target.on_host().copy_(host);
  });
  if (!non_blocking) synchronize(current_stream(), "upload");
}

void download(const Tensor& source, const Tensor& target, bool non_blocking) {
  num_downloads++;
  bool returns = non_blocking && is_pinned(target.data_ptr());
  Tensor host = target.detach();
  // Until the copy has run, the host must not read it: it finds nan.
  if (returns && host.is_contiguous()) memset(host.data_ptr(), 0xFF, host.nbytes());
  launch(current_stream(), "download", [host, own_source = View(source)](const LaunchPtr& own) {
    touch(own, own_source.address, own_source.extent(), false);
    host.copy_(own_source.on_host());
  });
  if (!returns) synchronize(current_stream(), "download");
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  auto source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  if (!on_device(target)) {
    download(source, target, non_blocking);
  } else if (!on_device(source)) {
    upload(source, target, non_blocking);
  } else {
    num_kernels++;
    launch(current_stream(), "copy", [from = View(source), to = View(target)](const LaunchPtr& own) {
      touch(own, from.address, from.extent(), false);
      touch(own, to.address, to.extent(), true);
      to.on_host().copy_(from.on_host());
    });
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  auto host = at::empty({}, self.options().device(c10::kCPU));
  launch(current_stream(), "item", [host, source = View(self)](const LaunchPtr& own) {
    touch(own, source.address, source.extent(), false);
    Tensor(host).copy_(source.on_host());
  });
  synchronize(current_stream(), "item");
  return at::_local_scalar_dense(host);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace
}  // namespace fake

extern "C" {
// Kernels, uploads from pinned memory, other uploads, and downloads so far.
void fake_counts(long* out) {
  out[0] = fake::num_kernels;
  out[1] = fake::num_uploads;
  out[2] = fake::num_unpinned_uploads;
  out[3] = fake::num_downloads;
}
}
