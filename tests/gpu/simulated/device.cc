// Registers the simulated GPUs as libtorch's CUDA devices.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>

#include "tests/gpu/simulated/memory.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct Event {
  DeviceIndex device;
  int64_t mark;
};

Event& EventOf(void* event) { return *static_cast<Event*>(event); }

// A device has one stream. Code that asks for another one is refused, so that the simulation is
// extended before such code exists.
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
    return Stream(Stream::DEFAULT, WithIndex(device));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void* getStreamNativeHandle(const Stream /*stream*/) const override { return nullptr; }
  bool queryStream(const Stream& stream) const override {
    return IsDone(stream.device_index(), Mark(stream.device_index()));
  }
  void synchronizeStream(const Stream& stream) const override {
    Synchronize(stream.device_index());
  }
  void synchronizeDevice(DeviceIndex device) const override { Synchronize(device); }

  void record(void** event, const Stream& stream, DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Event{};
    EventOf(*event) = {.device = stream.device_index(), .mark = Mark(stream.device_index())};
  }
  void block(void* /*event*/, const Stream& /*stream*/) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || IsDone(EventOf(event).device, EventOf(event).mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Synchronize(EventOf(event).device, EventOf(event).mark);
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
  void deviceSynchronize(DeviceIndex device) const override { Synchronize(device); }
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
