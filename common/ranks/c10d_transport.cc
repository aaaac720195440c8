#include "common/ranks/c10d_transport.h"

#include <arpa/inet.h>
#include <c10/util/Logging.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
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
#include "common/base/machine/host_port.h"
#include "common/base/steady_time.h"
#include "common/ranks/deadline.h"
#include "common/ranks/local_address.h"

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

Wait WaitFor(c10::intrusive_ptr<c10d::Work> work) {
  return [work = std::move(work)] { work->wait(); };
}

// Waits for work that writes `written`, which `tensor` then gets.
Wait WaitFor(c10::intrusive_ptr<c10d::Work> work, const at::Tensor& tensor,
             const at::Tensor& written) {
  return [work = std::move(work), tensor, written] {
    work->wait();
    if (!written.is_same(tensor)) tensor.copy_(written);
  };
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
  std::vector<std::string> values;
  for (const std::vector<uint8_t>& value : state_->store->multiGet(keys)) {
    values.emplace_back(value.begin(), value.end());
  }
  return values;
}

struct ProcessGroup::State {
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<::gloo::transport::Device> interface;  // the network interface of Gloo
  at::Device device;
  std::chrono::milliseconds timeout;
  c10::intrusive_ptr<c10d::Backend> backend;
  bool through_host = false;  // Gloo, for tensors of a device

  void Open(const std::string& name, int rank, int size);

  // The tensor that the backend reads or writes in place of one of the group's.
  at::Tensor ToRead(const at::Tensor& tensor) const { return through_host ? tensor.cpu() : tensor; }
  at::Tensor ToWrite(const at::Tensor& tensor) const {
    return through_host ? at::empty_like(tensor, at::kCPU) : tensor;
  }
};

void ProcessGroup::State::Open(const std::string& name, int rank, int size) {
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>(name, store);
#ifdef USE_C10D_NCCL
  if (!device.is_cpu()) {
    const auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = timeout;
    backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(prefixed, rank, size, options);
    backend->setBoundDeviceId(device);
    return;
  }
#endif
  through_host = !device.is_cpu();
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
                                             .backend = nullptr});
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
  std::vector<at::Tensor> tensors = {state_->ToRead(tensor)};
  return WaitFor(state_->backend->send(tensors, to, tag));
}

Wait ProcessGroup::Recv(const at::Tensor& tensor, int from, int tag) {
  std::vector<at::Tensor> tensors = {state_->ToWrite(tensor)};
  return WaitFor(state_->backend->recv(tensors, from, tag), tensor, tensors[0]);
}

Wait ProcessGroup::AllReduceSum(const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {state_->ToRead(tensor)};
  return WaitFor(state_->backend->allreduce(tensors), tensor, tensors[0]);
}

Wait ProcessGroup::AllReduceMax(const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {state_->ToRead(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  return WaitFor(state_->backend->allreduce(tensors, options), tensor, tensors[0]);
}

Wait ProcessGroup::Broadcast(const at::Tensor& tensor, int root) {
  std::vector<at::Tensor> tensors = {state_->ToRead(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return WaitFor(state_->backend->broadcast(tensors, options), tensor, tensors[0]);
}

Wait ProcessGroup::Barrier() { return WaitFor(state_->backend->barrier()); }

Wait ProcessGroup::ReduceScatter(const at::Tensor& output, const at::Tensor& input) {
  at::Tensor shard = state_->ToWrite(output), whole = state_->ToRead(input);
  return WaitFor(state_->backend->_reduce_scatter_base(shard, whole), output, shard);
}

Wait ProcessGroup::AllToAll(const at::Tensor& output, const at::Tensor& input,
                            const std::vector<int64_t>& received,
                            const std::vector<int64_t>& sent) {
  at::Tensor to = state_->ToWrite(output), from = state_->ToRead(input);
  std::vector<int64_t> to_rows = received, from_rows = sent;
  return WaitFor(state_->backend->alltoall_base(to, from, to_rows, from_rows), output, to);
}

Wait ProcessGroup::AllGather(const at::Tensor& output, const at::Tensor& input) {
  at::Tensor whole = state_->ToWrite(output), shard = state_->ToRead(input);
  return WaitFor(state_->backend->_allgather_base(whole, shard), output, whole);
}

}  // namespace tandem::ranks
