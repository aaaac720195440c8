// The functions of torch's c10d library that ranks use: a key-value store for the rendezvous, and
// the process groups of Gloo (CPU) and NCCL (CUDA). A build without NCCL sends tensors of a GPU
// with Gloo, through the host's memory, and so does every build among ranks that share a GPU. Keeps
// c10d's headers, which are slow to compile, out of everything else. For communicator.h and
// rank_monitor.h.
#ifndef TANDEM_COMMON_RANKS_TRANSPORT_C10D_TRANSPORT_H_
#define TANDEM_COMMON_RANKS_TRANSPORT_C10D_TRANSPORT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/base/machine/rank_environment.h"

namespace tandem::ranks {

// A thread-safe client of the key-value store that rank 0 hosts at master_addr:master_port. All
// methods throw std::exception if the host is gone, and block while it is stopped.
class RankStore {
 public:
  // Connects to the store, which rank 0 hosts as long as one of its RankStores lives. UNAVAILABLE,
  // with the address, if nothing listens there within `timeout`, or if what listens does not answer
  // within two seconds more. `prefix` is put before all keys.
  static absl::StatusOr<std::unique_ptr<RankStore>> Connect(const RankEnvironment& environment,
                                                            const std::string& prefix,
                                                            absl::Duration timeout);
  ~RankStore();
  RankStore(const RankStore&) = delete;
  RankStore& operator=(const RankStore&) = delete;

  void Set(const std::string& key, const std::string& value);
  // Creates a missing key with an empty value.
  void Touch(const std::string& key);
  bool Has(const std::string& key);
  // Waits for all keys. Returns whether they were there within `timeout`.
  bool WaitFor(const std::vector<std::string>& keys, absl::Duration timeout);
  // Returns the values of keys that exist.
  std::vector<std::string> Get(const std::vector<std::string>& keys);

 private:
  friend class ProcessGroup;
  struct State;
  explicit RankStore(std::shared_ptr<State> state);
  const std::shared_ptr<State> state_;
};

// Waits for an operation that was started; on a GPU the current stream waits, and the host only for
// Gloo. Throws if the operation failed.
using Wait = std::function<void()>;

// The connections between the ranks of a group. Methods start an operation and throw
// std::exception. Tensors are contiguous, on the group's device, and live until the Wait returns.
class ProcessGroup {
 public:
  // Collective over the `size` ranks that pass the same `name`, new to the store; at least two.
  static std::unique_ptr<ProcessGroup> Create(const RankStore& store, const std::string& name,
                                              int rank, int size, at::Device device,
                                              absl::Duration timeout);
  // Creates another group over the same store and network interface. `timeout` is this group's
  // unless given.
  std::unique_ptr<ProcessGroup> CreateSubgroup(const std::string& name, int rank, int size,
                                               at::Device device,
                                               std::optional<absl::Duration> timeout) const;
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  // Sends and receives with the same tag between two ranks match in order.
  Wait Send(const at::Tensor& tensor, int to, int tag);
  Wait Recv(const at::Tensor& tensor, int from, int tag);
  // Reduce in place, in the tensor's own type.
  Wait AllReduceSum(const at::Tensor& tensor);
  Wait AllReduceMax(const at::Tensor& tensor);
  Wait Broadcast(const at::Tensor& tensor, int root);
  Wait Barrier();
  // For a GPU alone: Gloo sends more than these collectives need.
  Wait ReduceScatter(const at::Tensor& output, const at::Tensor& input);
  Wait AllGather(const at::Tensor& output, const at::Tensor& input);
  // `received` and `sent` are numbers of rows by rank.
  Wait AllToAll(const at::Tensor& output, const at::Tensor& input,
                const std::vector<int64_t>& received, const std::vector<int64_t>& sent);

 private:
  struct State;
  explicit ProcessGroup(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_TRANSPORT_C10D_TRANSPORT_H_
