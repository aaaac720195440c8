// Operations of the simulated GPUs: those of the CPU, on the bytes of the device.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/graph.h"
#include "tests/gpu/simulated/host_bytes.h"
#include "tests/gpu/simulated/memory.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {

at::Tensor OnCpu(const at::Tensor& x) {
  const c10::Storage& storage = x.storage();
  c10::Storage bytes(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     c10::DataPtr(OnHost(storage.data()), at::kCPU), c10::GetAllocator(at::kCPU),
                     /*resizable=*/true);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return alias;
}

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kGpu(c10::DispatchKey::CUDA), kCpu(c10::DispatchKey::CPU);

Tensor EmptyStrided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                    c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &DeviceMemory(), kGpu, type);
}

// Returns a copy of a tensor of the CPU, with its strides.
Tensor OnGpu(const Tensor& x, c10::Device device) {
  Tensor copy = EmptyStrided(x.sizes(), x.strides(), x.scalar_type(), device);
  std::memcpy(OnHost(copy.mutable_data_ptr()), x.const_data_ptr(), copy.storage().nbytes());
  return copy;
}

// The tensors of devices among the arguments of an operation, beside those that the CPU sees.
class Operands {
 public:
  explicit Operands(const c10::OperatorHandle& op) : op_(op) {}

  IValue ToCpu(const IValue& argument) {
    if (argument.isTensor()) return ToCpu(argument.toTensor());
    if (argument.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : argument.toTensorVector()) list.push_back(ToCpu(x));
      return list;
    }
    if (argument.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& x : argument.toOptionalTensorVector()) {
        list.push_back(x.has_value() ? std::optional(ToCpu(*x)) : std::nullopt);
      }
      return list;
    }
    if (argument.isDevice()) {
      SetDevice(argument.toDevice());
      return c10::Device(at::kCPU);
    }
    return argument;
  }

  // Notes an argument, and whether the operation writes to it.
  void Use(const IValue& argument, bool writes) {
    if (argument.isTensor()) Use(argument.toTensor(), writes);
    if (argument.isTensorList()) {
      for (const Tensor& x : argument.toTensorVector()) Use(x, writes);
    }
    if (argument.isOptionalTensorList()) {
      for (const auto& x : argument.toOptionalTensorVector()) {
        if (x.has_value()) Use(*x, writes);
      }
    }
  }

  // Keeps what the operation is about to write, if it is captured.
  void Keep() const {
    for (const simulated_gpu::Use& use : uses_) {
      if (use.writes) KeepForCapture(use.address);
    }
  }

  // Adds the operation to the current stream of its device.
  void Enqueue() const {
    ++TheCounts().launches;
    simulated_gpu::Enqueue(CurrentStream(device().index()), uses_);
  }

  // Gives operands that the operation wrote new sizes, or new memory if it made some.
  void TakeShapes() {
    for (const auto& [gpu, cpu] : pairs_) {
      c10::TensorImpl* const to = gpu.unsafeGetTensorImpl();
      const c10::Storage& bytes = cpu.storage();
      c10::StorageImpl* const storage = gpu.storage().unsafeGetStorageImpl();
      if (bytes.data() != OnHost(storage->data())) {
        const c10::DeviceGuard guard(gpu.device());
        c10::DataPtr memory = DeviceMemory().allocate(bytes.nbytes());
        if (bytes.nbytes() > 0) std::memcpy(OnHost(memory.get()), bytes.data(), bytes.nbytes());
        storage->set_data_ptr_noswap(std::move(memory));
        storage->set_nbytes(bytes.nbytes());
        copied_.emplace_back(cpu, OnCpu(gpu));
      }
      if (gpu.sizes() != cpu.sizes() || gpu.strides() != cpu.strides()) {
        to->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      }
    }
  }

  // Returns the tensor of the device for a result of the operation: the operand itself, a view of
  // its memory, or a new tensor.
  Tensor ToGpu(const Tensor& result) {
    made_.emplace_back();
    if (!result.defined() || !device_.has_value()) return result;
    for (const auto& [gpu, cpu] : pairs_) {
      if (result.is_same(cpu)) return gpu;
    }
    for (const auto& [gpu, cpu] : pairs_) {
      if (result.storage().unsafeGetStorageImpl() != cpu.storage().unsafeGetStorageImpl()) continue;
      Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(gpu.storage()), gpu.key_set(), result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                        result.storage_offset());
      is_view_ = true;
      return view;
    }
    const Tensor made = OnGpu(result, *device_);
    Use(made, /*writes=*/true);
    made_.back() = OnCpu(made);
    return made;
  }
  IValue ToGpu(const IValue& result) {
    if (result.isTensor()) return ToGpu(result.toTensor());
    if (!result.isTensorList()) return result;
    c10::List<Tensor> list;
    for (const Tensor& x : result.toTensorVector()) list.push_back(ToGpu(x));
    return list;
  }

  c10::Device device() const { return device_.value_or(c10::Device(at::kCUDA, CurrentDevice())); }
  bool is_view() const { return is_view_; }
  // For each tensor of the results: the bytes of the new tensor that ToGpu made, on the CPU;
  // undefined: none.
  const std::vector<Tensor>& made() const { return made_; }
  // Operands that got new memory: as the CPU has them, and the bytes of that memory.
  const std::vector<std::pair<Tensor, Tensor>>& copied() const { return copied_; }

 private:
  void Use(const Tensor& x, bool writes) {
    if (x.defined() && x.is_cuda()) AddUses(x, writes, uses_);
  }

  static Tensor CopyOfNumber(const Tensor& x) {
    Tensor copy = x.clone();
    copy.unsafeGetTensorImpl()->set_wrapped_number(x.unsafeGetTensorImpl()->is_wrapped_number());
    return copy;
  }

  Tensor ToCpu(const Tensor& x) {
    if (!x.defined()) return x;
    if (x.is_cpu()) {
      TORCH_CHECK(x.dim() == 0, op_.schema().operator_name(), ": a tensor of shape ", x.sizes(),
                  " is on the CPU, others are on ", device());
      return IsCapturing() ? CopyOfNumber(x) : x;
    }
    SetDevice(x.device());
    pairs_.emplace_back(x, OnCpu(x));
    return pairs_.back().second;
  }

  void SetDevice(c10::Device device) {
    if (device.is_cuda() && !device.has_index()) device = {at::kCUDA, CurrentDevice()};
    TORCH_CHECK(!device_.has_value() || *device_ == device, op_.schema().operator_name(),
                ": tensors are on ", *device_, " and on ", device);
    device_ = device;
  }

  const c10::OperatorHandle& op_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // of the device, and with its bytes on the CPU
  std::optional<c10::Device> device_;
  std::vector<simulated_gpu::Use> uses_;
  std::vector<Tensor> made_;
  std::vector<std::pair<Tensor, Tensor>> copied_;
  bool is_view_ = false;
};

// Whether the shape of an operation's result depends on values: the host waits for them.
bool HasShapeOfValues(std::string_view name, at::ArrayRef<IValue> arguments) {
  if (name == "aten::repeat_interleave") return arguments[1].isNone();  // the size of its result
  if (name.starts_with("aten::index") && arguments.size() > 1 &&
      arguments[1].isOptionalTensorList()) {
    return std::ranges::any_of(arguments[1].toOptionalTensorVector(), [](const auto& index) {
      return index.has_value() && index->defined() && index->scalar_type() == at::kBool;
    });
  }
  constexpr std::array<std::string_view, 6> kNames = {"aten::nonzero",  "aten::masked_select",
                                                      "aten::_unique2", "aten::unique_dim",
                                                      "aten::bincount", "aten::unique_consecutive"};
  return std::ranges::find(kNames, name) != kNames.end();
}

// Runs a captured operation again, and gives its results to the tensors of the capture.
void Repeat(const c10::OperatorHandle& op, Stack stack, const std::vector<Tensor>& made,
            const std::vector<std::pair<Tensor, Tensor>>& copied) {
  op.redispatchBoxed(kCpu, &stack);
  for (const auto& [cpu, to] : copied) {
    std::memcpy(to.storage().mutable_data(), cpu.storage().data(), to.storage().nbytes());
  }
  auto to = made.begin();
  const auto give = [&](const Tensor& result) {
    if (to->defined()) {
      TORCH_CHECK(result.sizes() == to->sizes() && result.strides() == to->strides(),
                  op.schema().operator_name(), ": a replay has another shape");
      std::memcpy(to->storage().mutable_data(), result.const_data_ptr(), to->storage().nbytes());
    }
    ++to;
  };
  for (const IValue& result : stack) {
    if (result.isTensor()) give(result.toTensor());
    if (!result.isTensorList()) continue;
    for (const Tensor& x : result.toTensorVector()) give(x);
  }
}

void RunOnCpu(const c10::OperatorHandle& op, Stack* stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const size_t num_returns = op.schema().returns().size();
  Operands operands(op);
  const at::DisableRecordFunctionGuard unseen;  // by those who count operations
  bool waits = HasShapeOfValues(op.schema().name(), torch::jit::last(*stack, num_arguments));
  for (size_t i = 0; i < num_arguments; ++i) {
    IValue& argument = (*stack)[stack->size() - num_arguments + i];
    const c10::AliasInfo* const alias = op.schema().arguments()[i].alias_info();
    operands.Use(argument, alias != nullptr && alias->isWrite());
    argument = operands.ToCpu(argument);
  }
  operands.Keep();
  Stack arguments;
  if (IsCapturing()) {
    arguments.assign(stack->end() - static_cast<std::ptrdiff_t>(num_arguments), stack->end());
  }
  op.redispatchBoxed(kCpu, stack);
  operands.TakeShapes();
  for (size_t i = stack->size() - num_returns; i < stack->size(); ++i) {
    const IValue& result = (*stack)[i];
    waits |= !result.isTensor() && !result.isTensorList();
    (*stack)[i] = operands.ToGpu(result);
  }
  if (!operands.is_view()) {
    operands.Enqueue();
    if (IsCapturing()) {
      Record([op, arguments, made = operands.made(), copied = operands.copied()] {
        Repeat(op, arguments, made, copied);
      });
    }
  }
  if (waits) Synchronize(CurrentStream(operands.device().index()));
}

Tensor Empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
             std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
             std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &DeviceMemory(), kGpu,
                                   type.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor EmptyWithStrides(at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<at::ScalarType> type, std::optional<at::Layout> /*layout*/,
                        std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  return EmptyStrided(sizes, strides, type.value_or(at::get_default_dtype_as_scalartype()),
                      device.value_or(c10::Device(at::kCUDA)));
}

Tensor& Copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_cuda() && from.is_cuda()) {
    const int reader = CurrentStream(from.device().index());
    const int writer = CurrentStream(to.device().index());
    // Between devices libtorch copies on the one's stream, and orders it with the other's.
    if (reader != writer) WaitForEvent(reader, RecordEvent(writer));
    ++TheCounts().launches;
    KeepForCapture(to.storage().data());
    std::vector<Use> uses;
    AddUses(from, /*writes=*/false, uses);
    AddUses(to, /*writes=*/true, uses);
    Enqueue(reader, uses);
    if (reader != writer) WaitForEvent(writer, RecordEvent(reader));
    const auto copy = [to = OnCpu(to), from = OnCpu(from)] { to.copy_(from); };
    copy();
    Record(copy);
    return to;
  }
  RefuseInCapture("a copy between host and device");
  if (to.is_cuda()) {
    Launch({}, {to});
    OnCpu(to).copy_(from);
    const int stream = CurrentStream(to.device().index());
    if (non_blocking && IsPinned(from.const_data_ptr())) {
      ReadLater(stream, from);
    } else {
      Synchronize(stream);  // CUDA may wait before it stages pageable memory
    }
  } else {
    Launch({from}, {});
    const int stream = CurrentStream(from.device().index());
    DeliverLater(stream, to, OnCpu(from).to(to.scalar_type()).expand(to.sizes()).clone());
    if (!non_blocking) Synchronize(stream);
  }
  return to;
}

at::Scalar Item(const Tensor& x) {
  std::vector<Use> uses;
  AddUses(x, /*writes=*/false, uses);
  Enqueue(CurrentStream(x.device().index()), uses);
  Synchronize(CurrentStream(x.device().index()));
  return OnCpu(x).item();
}

Tensor& SetStorage(Tensor& x, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                   at::IntArrayRef strides) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return x;
}

void RecordStream(Tensor& x, at::Stream stream) {
  DeviceMemory().recordStream(x.storage().data_ptr(), stream);
}

// Products of bfloat16 with a result of float32, which the CPU does not have.
Tensor BatchedProduct(const Tensor& a, const Tensor& b, at::ScalarType type) {
  return at::bmm(a.to(type), b.to(type));
}
Tensor Product(const Tensor& a, const Tensor& b, at::ScalarType type) {
  return at::mm(a.to(type), b.to(type));
}
Tensor& ProductOut(const Tensor& a, const Tensor& b, at::ScalarType type, Tensor& out) {
  return at::mm_out(out, a.to(type), b.to(type));
}
Tensor& SumOfProductOut(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType type,
                        const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return at::addmm_out(out, c, a.to(type), b.to(type), beta, alpha);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnCpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &Empty);
  library.impl("empty_strided", &EmptyWithStrides);
  library.impl("copy_", &Copy);
  library.impl("_local_scalar_dense", &Item);
  library.impl("set_.source_Storage_storage_offset", &SetStorage);
  library.impl("record_stream", &RecordStream);
  library.impl("bmm.dtype", &BatchedProduct);
  library.impl("mm.dtype", &Product);
  library.impl("mm.dtype_out", &ProductOut);
  library.impl("addmm.dtype_out", &SumOfProductOut);
}

}  // namespace
}  // namespace tandem::simulated_gpu
