// Registers the simulated GPUs as libtorch's CUDA devices.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "tests/gpu/simulated/memory.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Event& EventOf(void* event) { return *static_cast<Event*>(event); }

int StreamOf(const Stream& stream) {
  return simulated_gpu::StreamOf(stream.device_index(), stream.id());
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    SetCurrentDevice(device.index());
    return before;
  }
  Device getDevice() const override { return {DeviceType::CUDA, CurrentDevice()}; }
  void setDevice(Device device) const override {
    if (device.has_index()) SetCurrentDevice(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Stream getStream(Device device) const override {
    const Device with_index = WithIndex(device);
    return Stream(Stream::UNSAFE, with_index, CurrentStream(with_index.index()) % kStreamsOfDevice);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, WithIndex(device));
  }
  Stream getStreamFromGlobalPool(Device device, bool is_high_priority) const override {
    static std::atomic<int64_t> asked = 0, asked_of_high_priority = 0;
    constexpr int kOfHighPriority = kStreamsOfDevice - kFirstOfHighPriority;
    const int64_t id = is_high_priority
                           ? kFirstOfHighPriority + asked_of_high_priority++ % kOfHighPriority
                           : 1 + asked++ % (kFirstOfHighPriority - 1);
    return Stream(Stream::UNSAFE, WithIndex(device), id);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    SetCurrentStream(StreamOf(stream));
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  // The number of the stream on its device, of which CUDA's default stream has 0, too.
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    return IsDone(RecordEvent(StreamOf(stream)));
  }
  void synchronizeStream(const Stream& stream) const override { Synchronize(StreamOf(stream)); }
  void synchronizeDevice(DeviceIndex device) const override { SynchronizeDevice(device); }

  void record(void** event, const Stream& stream, DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event{};
    EventOf(*event) = RecordEvent(StreamOf(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) WaitForEvent(StreamOf(stream), EventOf(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || IsDone(EventOf(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Synchronize(EventOf(event));
  }
  void destroyEvent(void* event, DeviceIndex /*device*/) const noexcept override {
    const std::unique_ptr<Event> owned(static_cast<Event*>(event));
  }

 private:
  static Device WithIndex(Device device) {
    return device.has_index() ? device : Device(device.type(), CurrentDevice());
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs /*unused*/) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex current_device() const override { return CurrentDevice(); }
  DeviceIndex getCurrentDevice() const override { return CurrentDevice(); }
  void setCurrentDevice(DeviceIndex device) const override { SetCurrentDevice(device); }
  bool isPinnedPtr(const void* address) const override { return IsPinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &DeviceMemory(); }
  void deviceSynchronize(DeviceIndex device) const override { SynchronizeDevice(device); }
};

struct Registration {
  Registration() {
    c10::SetAllocator(DeviceType::CUDA, &DeviceMemory());
    at::setHostAllocator(DeviceType::CUDA, &PinnedMemory());
  }
};
const Registration registration;

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace
}  // namespace tandem::simulated_gpu

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, tandem::simulated_gpu::Hooks)
}  // namespace at
