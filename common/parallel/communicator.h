// The collectives of a group of ranks.
#ifndef TANDEM_COMMON_PARALLEL_COMMUNICATOR_H_
#define TANDEM_COMMON_PARALLEL_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/base/rank_environment.h"

namespace tandem::parallel {

class ProcessGroup;
class RankStore;

struct CommunicatorOptions {
  at::Device device = at::kCPU;  // of all tensors: Gloo on the CPU, NCCL on CUDA
  // How long one rank waits for another: in Connect, and in every collective on the CPU.
  absl::Duration timeout = absl::Minutes(10);
};

// Of a group that differs from the one that it is split off.
struct SplitOptions {
  std::optional<at::Device> device;
  std::optional<absl::Duration> timeout;
};

enum class Reduction { kSum, kMax };

struct CollectiveVolume {
  int64_t calls = 0;
  int64_t bytes = 0;
};

// What this rank has *sent*, by the standard formulas for n ranks.
struct CommunicationVolume {
  CollectiveVolume all_reduce;      // 2 (n-1)/n of the tensor
  CollectiveVolume reduce_scatter;  // (n-1)/n of the whole
  CollectiveVolume all_gather;      // (n-1)/n of the whole
  CollectiveVolume broadcast;       // the tensor, at the root alone
  CollectiveVolume send;            // the tensor
  CollectiveVolume plain_data;      // BroadcastBytes and AllGatherBytes, by the same formulas

  int64_t bytes() const;
};

// A transfer that was started. Its tensors must live, and stay as they are, until Wait.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::function<void()> wait) : wait_(std::move(wait)) {}
  Pending(Pending&& other) noexcept;
  // Waits for what it was before.
  Pending& operator=(Pending&& other) noexcept;
  // Waits; an error is dropped.
  ~Pending();

  // Returns when the tensors may be used (CUDA: by work that follows on the current stream). A
  // second call does nothing. Throws c10::Error.
  void Wait();

 private:
  std::function<void()> wait_;
};

// Every rank of the group calls the same collectives in the same order, from one thread at a time.
// Tensors are contiguous, on the group's device, and of the same size and type on every rank.
//
// Methods that move tensors throw c10::Error: a message says which collective, on which rank among
// which, and, where it is known, which peer it was about. Then the group is unusable, and what a
// collective writes to undefined. Ranks in messages are those of the outermost communicator.
//
// In a group of one rank everything is the identity and costs nothing. Ranks that leave at
// different times call Barrier first: the process of a peer that is gone is an error.
class Communicator {
 public:
  // The group of all ranks. Once per process and address. UNAVAILABLE, with the address and the
  // ranks that are missing, if it does not come about in time.
  static absl::StatusOr<std::shared_ptr<Communicator>> Connect(const RankEnvironment& environment,
                                                               const CommunicatorOptions& options);
  // A group of this process alone.
  static std::shared_ptr<Communicator> Alone();
  // Starts no communication. A Pending must be gone by then.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // The one of `groups` (ranks of this communicator, in the order of the new ranks) that holds this
  // rank; nullptr if none does. Collective over this communicator: every rank passes the same list,
  // and no rank is in two groups. `name` is for messages.
  std::shared_ptr<Communicator> Split(const std::string& name,
                                      const std::vector<std::vector<int>>& groups,
                                      const SplitOptions& options = {});

  // Called with the message of every collective that fails, before it throws, here and in groups
  // that are split off from now on.
  void SetFailureHandler(std::function<void(const std::string& failure)> handler) {
    on_failure_ = std::move(handler);
  }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  at::Device device() const { return device_; }

  // In place. float32, float64 or int64 in their own type, bfloat16 through float32 (and so twice
  // its bytes). All ranks get the same bits.
  void AllReduce(at::Tensor& tensor, Reduction reduction);

  // `output` [k]: the sum over the ranks of this rank's part of `input` [size * k]; it may be that
  // part itself, whose memory it then overwrites. On the CPU the parts are added in the order of
  // the ranks, so the result is deterministic, with temporary memory of (size - 1) k. Types as in
  // AllReduce; bfloat16 is added in float32 and rounded once.
  void ReduceScatter(const at::Tensor& output, const at::Tensor& input);
  Pending ReduceScatterAsync(const at::Tensor& output, const at::Tensor& input);

  // `output` [size * k]: the `input` [k] of all ranks; `input` may be this rank's part of it. Any
  // type.
  void AllGather(const at::Tensor& output, const at::Tensor& input);
  Pending AllGatherAsync(const at::Tensor& output, const at::Tensor& input);

  void Broadcast(at::Tensor& tensor, int root);

  // Sends and receives between a pair of ranks match in order. Send may wait for its Recv.
  void Send(const at::Tensor& tensor, int to);
  void Recv(at::Tensor& tensor, int from);
  Pending SendAsync(const at::Tensor& tensor, int to);
  Pending RecvAsync(at::Tensor& tensor, int from);

  void Barrier();

  // Plain data of any length: the root's, or every rank's.
  std::string BroadcastBytes(std::string bytes, int root);
  std::vector<std::string> AllGatherBytes(const std::string& bytes);

  // Of this group alone: subgroups count their own.
  CommunicationVolume volume() const { return volume_; }
  void ResetVolume() { volume_ = {}; }

 private:
  Communicator(std::string name, std::vector<int> ranks, int rank, at::Device device);

  // Runs `body` and adds to its errors what they are about; `peer` is a rank of this group, or -1.
  void Run(absl::string_view what, int peer, absl::FunctionRef<void()> body) const;
  void CheckTensor(absl::string_view what, const at::Tensor& tensor) const;
  void CheckPeer(absl::string_view what, int peer) const;
  void CheckParts(absl::string_view what, const at::Tensor& whole, const at::Tensor& part) const;
  at::Tensor Part(const at::Tensor& whole, int rank) const;
  void Count(CollectiveVolume& kind, int64_t bytes) const;

  // Without checks and counts.
  void DoBroadcast(const at::Tensor& tensor, int root);
  std::function<void()> DoAllGather(const at::Tensor& output, const at::Tensor& input);
  std::function<void()> DoReduceScatter(const at::Tensor& output, const at::Tensor& input);
  std::function<void()> AddInRankOrder(const at::Tensor& output, const at::Tensor& input);

  const std::string name_;
  const std::vector<int> ranks_;  // of this group, as the outermost communicator counts them
  const int rank_;
  const at::Device device_;
  int splits_ = 0;
  CommunicationVolume volume_;
  std::function<void(const std::string&)> on_failure_;
  std::shared_ptr<RankStore> store_;     // shared with subgroups; it outlives the connections
  std::unique_ptr<ProcessGroup> group_;  // none for a single rank
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_COMMUNICATOR_H_
