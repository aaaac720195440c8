// The part of torch's c10d library that the ranks of a group speak: a key-value store for the
// rendezvous, and the process groups of Gloo (CPU) and NCCL (CUDA). Keeps c10d's headers, slow to
// compile, out of everything else. For communicator.h and rank_monitor.h.
#ifndef TANDEM_COMMON_PARALLEL_C10D_TRANSPORT_H_
#define TANDEM_COMMON_PARALLEL_C10D_TRANSPORT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/base/rank_environment.h"

namespace tandem::parallel {

// A client, thread-safe, of the key-value store that rank 0 hosts at master_addr:master_port. All
// methods throw std::exception if the host is gone, and block for as long as it is stopped.
class RankStore {
 public:
  // Rank 0 hosts the store, for as long as one of its RankStores lives. UNAVAILABLE, with the
  // address, if the host does not answer within `timeout`. `prefix` is put before all keys.
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
  // Whether all keys were there within `timeout`.
  bool WaitFor(const std::vector<std::string>& keys, absl::Duration timeout);
  // The values of keys that exist.
  std::vector<std::string> Get(const std::vector<std::string>& keys);

 private:
  friend class ProcessGroup;
  struct State;
  explicit RankStore(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Waits for what was started, and throws if it failed.
using Wait = std::function<void()>;

// Connections between the ranks of a group. Tensors are contiguous and on the group's device; they
// live until the Wait is done. Methods throw std::exception.
class ProcessGroup {
 public:
  // Collective over the `size` ranks that pass the same `name`, new to the store; at least two.
  static std::unique_ptr<ProcessGroup> Create(const RankStore& store, const std::string& name,
                                              int rank, int size, at::Device device,
                                              absl::Duration timeout);
  // Another group over the same store and network interface; without a timeout, this one's.
  std::unique_ptr<ProcessGroup> CreateSubgroup(const std::string& name, int rank, int size,
                                               at::Device device,
                                               std::optional<absl::Duration> timeout) const;
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  // Those with the same tag between a pair of ranks match in order.
  Wait Send(const at::Tensor& tensor, int to, int tag);
  Wait Recv(const at::Tensor& tensor, int from, int tag);
  // In place, in the tensor's own type.
  Wait AllReduceSum(const at::Tensor& tensor);
  Wait AllReduceMax(const at::Tensor& tensor);
  Wait Broadcast(const at::Tensor& tensor, int root);
  Wait Barrier();
  // NCCL alone: Gloo's would send more than it must.
  Wait ReduceScatter(const at::Tensor& output, const at::Tensor& input);
  Wait AllGather(const at::Tensor& output, const at::Tensor& input);

 private:
  struct State;
  explicit ProcessGroup(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_C10D_TRANSPORT_H_
