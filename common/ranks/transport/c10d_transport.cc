#include "common/ranks/transport/c10d_transport.h"

#include <arpa/inet.h>
#include <c10/util/Logging.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/base/machine/gpu_memory.h"
#include "common/base/machine/host_port.h"
#include "common/base/steady_time.h"
#include "common/ranks/deadline.h"
#include "common/ranks/transport/gpu_sharing.h"
#include "common/ranks/transport/local_address.h"
#include "common/ranks/transport/staged_operation.h"
#include "common/tensor/aten/peer_memory.h"

namespace tandem::ranks {
namespace {

// A socket that listens at an IPv4 loopback address alone: c10d itself listens at every address of
// the machine. nullopt where the address is another one, or is taken: by this process's own store,
// perhaps.
std::optional<int> ListenOnLoopback(const RankEnvironment& environment) {
  if (!IsLoopbackHost(environment.master_addr) || absl::StrContains(environment.master_addr, ':')) {
    return std::nullopt;
  }
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return std::nullopt;
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(environment.master_port));
  if (inet_pton(AF_INET, environment.master_addr.c_str(), &address.sin_addr) != 1) {
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      listen(fd, SOMAXCONN) == 0) {
    return fd;
  }
  close(fd);
  return std::nullopt;
}

c10::intrusive_ptr<c10d::Store> OpenStore(const RankEnvironment& environment, bool host,
                                          absl::Duration timeout) {
  // c10d warns of every address that has no name.
  FLAGS_caffe2_log_level = c10::GLOG_ERROR;
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.master_port);
  options.isServer = host;
  if (host) options.masterListenFd = ListenOnLoopback(environment);
  options.waitWorkers = false;
  // The clients of rank 0 share one server.
  options.multiTenant = true;
  // c10d counts whole seconds when it connects.
  options.timeout = absl::ToChronoMilliseconds(std::max(timeout, absl::Seconds(1)));
  return c10::make_intrusive<c10d::TCPStore>(environment.master_addr, options);
}

std::vector<uint8_t> Bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::vector<std::string> Texts(const std::vector<std::vector<uint8_t>>& values) {
  std::vector<std::string> texts;
  for (const std::vector<uint8_t>& value : values) texts.emplace_back(value.begin(), value.end());
  return texts;
}

// An operation that a backend does on tensors of its device, or, where `device` is given, on copies
// of the host of tensors there.
class Operation {
 public:
  explicit Operation(std::optional<at::Device> device) {
    if (device.has_value()) staged_ = std::make_shared<StagedOperation>(*device);
  }

  // Return the tensor that the backend reads, writes, or both, in place of one of the group's.
  at::Tensor Read(const at::Tensor& tensor) { return staged_ ? staged_->Read(tensor) : tensor; }
  at::Tensor Write(const at::Tensor& tensor) { return staged_ ? staged_->Write(tensor) : tensor; }
  at::Tensor Update(const at::Tensor& tensor) { return staged_ ? staged_->Update(tensor) : tensor; }

  Wait Started(c10::intrusive_ptr<c10d::Work> work) {
    return [work = std::move(work), staged = staged_] {
      work->wait();
      if (staged != nullptr) staged->End();
    };
  }

 private:
  std::shared_ptr<StagedOperation> staged_;
};

// Whether two ranks of a new group have the same GPU. Collective over the group.
bool SharesGpu(c10d::Store& store, at::Device device, int rank, int size) {
  std::vector<std::string> keys;
  for (int of = 0; of < size; ++of) keys.push_back(absl::StrCat("gpu/", of));
  store.set(keys[rank], Bytes(absl::StrCat(MachineId(), "/", GpuUuid(device))));
  store.wait(keys);
  return RanksOnOneGpu(Texts(store.multiGet(keys))).has_value();
}

// Once a process: a layout has several groups.
void WarnOfSharedGpu() {
  static std::once_flag warned;
  std::call_once(warned, [] {
    Log(LogLevel::kWarning, "ranks_share_gpu",
        {{"message",
          "two ranks compute on one GPU, and NCCL makes no group of them: they send with Gloo, "
          "through the host's memory, which takes longer"}});
  });
}

}  // namespace

struct RankStore::State {
  c10::intrusive_ptr<c10d::Store> store;  // with the prefix
  std::string local_address;              // this machine's, as rank 0 sees it
};

RankStore::RankStore(std::shared_ptr<State> state) : state_(std::move(state)) {}
RankStore::~RankStore() = default;

absl::StatusOr<std::unique_ptr<RankStore>> RankStore::Connect(const RankEnvironment& environment,
                                                              const std::string& prefix,
                                                              absl::Duration timeout) {
  const SteadyTime deadline = SteadyTime::Now() + timeout;
  const bool host = environment.rank == 0;
  const auto state = std::make_shared<State>();
  const absl::Status status = RunUntil(deadline + kC10dGrace, "store", [=]() -> absl::Status {
    c10::intrusive_ptr<c10d::Store> store;
    if (host) store = OpenStore(environment, host, timeout);
    // Connects where another process already listens: c10d waits a second after a failed
    // attempt.
    TANDEM_ASSIGN_OR_RETURN(
        state->local_address,
        LocalAddressToward(environment.master_addr, environment.master_port, deadline));
    if (!host) store = OpenStore(environment, host, deadline - SteadyTime::Now());
    state->store = c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
    return absl::OkStatus();
  });
  if (!status.ok()) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", environment.rank, " cannot ", host ? "host" : "reach", " the store at ",
        environment.master_addr, ":", environment.master_port, ": ", status.message()));
  }
  return std::unique_ptr<RankStore>(new RankStore(state));
}

void RankStore::Set(const std::string& key, const std::string& value) {
  state_->store->set(key, Bytes(value));
}

void RankStore::Touch(const std::string& key) { state_->store->append(key, {}); }

bool RankStore::Has(const std::string& key) { return state_->store->check({key}); }

bool RankStore::WaitFor(const std::vector<std::string>& keys, absl::Duration timeout) {
  try {
    state_->store->wait(keys, absl::ToChronoMilliseconds(std::max(timeout, absl::Milliseconds(1))));
  } catch (const c10::DistStoreError&) {
    return false;
  }
  return true;
}

std::vector<std::string> RankStore::Get(const std::vector<std::string>& keys) {
  return Texts(state_->store->multiGet(keys));
}

struct ProcessGroup::State {
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<::gloo::transport::Device> interface;  // the network interface of Gloo
  at::Device device;
  std::chrono::milliseconds timeout;
  c10::intrusive_ptr<c10d::Backend> backend;
  bool is_first = false;             // of the ranks of the outermost group
  std::optional<at::Device> staged;  // whose tensors Gloo sends through the host's memory

  void Open(const std::string& name, int rank, int size);
};

void ProcessGroup::State::Open(const std::string& name, int rank, int size) {
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(name, store);
  const bool share_gpu = !device.is_cpu() && SharesGpu(*prefixed, device, rank, size);
#ifdef USE_C10D_NCCL
  if (!device.is_cpu() && !share_gpu) {
    staged.reset();
    const auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = timeout;
    backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(prefixed, rank, size, options);
    backend->setBoundDeviceId(device);
    return;
  }
#endif
  if (share_gpu && is_first) WarnOfSharedGpu();
  staged = device.is_cpu() ? std::nullopt : std::optional(device);
  const auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices = {interface};
  options->threads = 1;  // collectives follow one another
  backend = c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, rank, size, options);
}

ProcessGroup::ProcessGroup(std::unique_ptr<State> state) : state_(std::move(state)) {}
ProcessGroup::~ProcessGroup() = default;

std::unique_ptr<ProcessGroup> ProcessGroup::Create(const RankStore& store, const std::string& name,
                                                   int rank, int size, at::Device device,
                                                   absl::Duration timeout) {
  auto state = std::make_unique<State>(State{.store = store.state_->store,
                                             .interface = nullptr,
                                             .device = device,
                                             .timeout = absl::ToChronoMilliseconds(timeout),
                                             .backend = nullptr,
                                             .is_first = rank == 0,
                                             .staged = std::nullopt});
  // A group on a GPU has one, too: groups on the host may be split off from it.
  state->interface = c10d::ProcessGroupGloo::createDeviceForHostname(store.state_->local_address);
  state->Open(name, rank, size);
  return std::unique_ptr<ProcessGroup>(new ProcessGroup(std::move(state)));
}

std::unique_ptr<ProcessGroup> ProcessGroup::CreateSubgroup(
    const std::string& name, int rank, int size, at::Device device,
    std::optional<absl::Duration> timeout) const {
  auto state = std::make_unique<State>(*state_);
  state->device = device;
  if (timeout.has_value()) state->timeout = absl::ToChronoMilliseconds(*timeout);
  state->Open(name, rank, size);
  return std::unique_ptr<ProcessGroup>(new ProcessGroup(std::move(state)));
}

Wait ProcessGroup::Send(const at::Tensor& tensor, int to, int tag) {
  Operation operation(state_->staged);
  std::vector<at::Tensor> tensors = {operation.Read(tensor)};
  return operation.Started(state_->backend->send(tensors, to, tag));
}

Wait ProcessGroup::Recv(const at::Tensor& tensor, int from, int tag) {
  Operation operation(state_->staged);
  std::vector<at::Tensor> tensors = {operation.Write(tensor)};
  return operation.Started(state_->backend->recv(tensors, from, tag));
}

Wait ProcessGroup::AllReduceSum(const at::Tensor& tensor) {
  Operation operation(state_->staged);
  std::vector<at::Tensor> tensors = {operation.Update(tensor)};
  return operation.Started(state_->backend->allreduce(tensors));
}

Wait ProcessGroup::AllReduceMax(const at::Tensor& tensor) {
  Operation operation(state_->staged);
  std::vector<at::Tensor> tensors = {operation.Update(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  return operation.Started(state_->backend->allreduce(tensors, options));
}

Wait ProcessGroup::Broadcast(const at::Tensor& tensor, int root) {
  Operation operation(state_->staged);
  const bool sends = state_->backend->getRank() == root;
  std::vector<at::Tensor> tensors = {sends ? operation.Read(tensor) : operation.Write(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return operation.Started(state_->backend->broadcast(tensors, options));
}

Wait ProcessGroup::Barrier() {
  return [work = state_->backend->barrier()] { work->wait(); };
}

Wait ProcessGroup::ReduceScatter(const at::Tensor& output, const at::Tensor& input) {
  Operation operation(state_->staged);
  at::Tensor whole = operation.Read(input), shard = operation.Write(output);
  return operation.Started(state_->backend->_reduce_scatter_base(shard, whole));
}

Wait ProcessGroup::AllToAll(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& received,
                            const std::vector<int64_t>& sent) {
  Operation operation(state_->staged);
  at::Tensor from = operation.Read(input), to = operation.Write(output);
  std::vector<int64_t> to_rows = received, from_rows = sent;
  return operation.Started(state_->backend->alltoall_base(to, from, to_rows, from_rows));
}

Wait ProcessGroup::AllGather(const at::Tensor& output, const at::Tensor& input) {
  Operation operation(state_->staged);
  at::Tensor shard = operation.Read(input), whole = operation.Write(output);
  return operation.Started(state_->backend->_allgather_base(whole, shard));
}

}  // namespace tandem::ranks
