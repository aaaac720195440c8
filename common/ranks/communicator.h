// Collectives among the ranks of a process group.
#ifndef TANDEM_COMMON_RANKS_COMMUNICATOR_H_
#define TANDEM_COMMON_RANKS_COMMUNICATOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/base/machine/rank_environment.h"

namespace tandem::ranks {

class ProcessGroup;
class RankStore;

struct CommunicatorOptions {
  at::Device device = at::kCPU;  // of all tensors
  // The longest wait of one rank for another: in Connect, and in every collective on the CPU.
  absl::Duration timeout;
};

// Overrides for a process group created by Split; unset fields are inherited from the parent group.
struct SplitOptions {
  std::optional<at::Device> device;
  std::optional<absl::Duration> timeout;
};

// The timeout of groups whose ranks may meet hours apart.
inline constexpr absl::Duration kNoTimeLimit = absl::Hours(24 * 365);

enum class Reduction { kSum, kMax };

struct CollectiveVolume {
  int64_t calls = 0;
  int64_t bytes = 0;
};

// The bytes that this rank has *sent*, by the standard formulas for n ranks.
struct CommunicationVolume {
  CollectiveVolume all_reduce;      // 2 (n-1)/n of the tensor
  CollectiveVolume reduce_scatter;  // (n-1)/n of the whole
  CollectiveVolume all_gather;      // (n-1)/n of the whole
  CollectiveVolume broadcast;       // the tensor, at the root alone
  CollectiveVolume all_to_all;      // the rows for other ranks
  CollectiveVolume send;            // the tensor
  CollectiveVolume plain_data;      // BroadcastBytes and AllGatherBytes, by the same formulas
  // The tensors of Recv: what this rank got, which bytes() does not count.
  CollectiveVolume receive;

  // Sent bytes of all kinds.
  int64_t bytes() const;
  CommunicationVolume& operator+=(const CommunicationVolume& other);
  CommunicationVolume& operator-=(const CommunicationVolume& other);
};

// Handle of an asynchronous collective, or of several. All of their communication is started before
// the handle is returned: neither Wait nor the destructor nor an assignment starts any, so that a
// handle dropped on one rank (an exception, say) leaves the ranks' collectives in the same order.
// The collective's tensors must stay alive and unchanged until Wait returns.
class CollectiveHandle {
 public:
  CollectiveHandle() = default;
  // `wait` returns when the collective has ended; it starts no other.
  explicit CollectiveHandle(std::function<void()> wait) : wait_(std::move(wait)) {}
  CollectiveHandle(CollectiveHandle&& other) noexcept;
  // Waits for the collective that this handle had before.
  CollectiveHandle& operator=(CollectiveHandle&& other) noexcept;
  // Waits; ignores an error.
  ~CollectiveHandle();

  // Returns when the tensors may be used (CUDA: by work that follows on the current stream). A
  // second call does nothing. Throws c10::Error.
  void Wait();

 private:
  std::function<void()> wait_;
};

// A process group. Every rank of it calls the same collectives in the same order, from one thread
// at a time. Tensors are contiguous, on the group's device, and of the same size and type on every
// rank.
//
// Methods that move tensors throw c10::Error. Its message names the collective, this rank, the
// ranks of the group and, where it is known, the peer that failed; rank numbers in it are those of
// the outermost communicator. After an error the group is unusable, and the collective's output
// undefined.
//
// In a group of one rank everything is the identity and costs nothing. Ranks that leave at
// different times call Barrier first: a collective with a process that has ended is an error.
class Communicator {
 public:
  // Joins the group of all ranks; once per process and address. UNAVAILABLE, with the address and
  // the missing ranks, if not all of them have joined within the timeout.
  static absl::StatusOr<std::shared_ptr<Communicator>> Connect(const RankEnvironment& environment,
                                                               const CommunicatorOptions& options);
  // A group of this process alone.
  static std::shared_ptr<Communicator> Alone();
  // All CollectiveHandles must be gone. Starts no communication.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Creates the one of `groups` that holds this rank; returns nullptr if none does. A group lists
  // ranks of this communicator in the order of their new numbers; no rank is in two groups.
  // Collective over this communicator: every rank passes the same list. `name` is for messages.
  std::shared_ptr<Communicator> Split(const std::string& name,
                                      const std::vector<std::vector<int>>& groups,
                                      const SplitOptions& options = {});

  // Sets a function that is called with the message of every collective that fails, before it
  // throws: in this group, and in groups that are split off later.
  void SetFailureHandler(std::function<void(const std::string& failure)> handler) {
    on_failure_ = std::move(handler);
  }

  // Returns the same ranks on the same device without a time limit: for ranks that read or write
  // files between their meetings, however long a disk takes. Created by the first call, which is
  // collective.
  const std::shared_ptr<Communicator>& patient();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_.size()); }
  at::Device device() const { return device_; }

  // Reduces in place: float32, float64 and int64 in their own type, bfloat16 in float32 (which
  // doubles its bytes). All ranks get the same bits.
  void AllReduce(at::Tensor& tensor, Reduction reduction);

  // Sets `output` [k] to the sum over all ranks of this rank's shard of `input` [size * k].
  // `output` may be that shard of `input` itself. On the CPU the shards are added in the order of
  // the ranks, so the result is deterministic; temporary memory is (size - 1) k values. Types as in
  // AllReduce; bfloat16 is added in float32 and rounded once.
  void ReduceScatter(const at::Tensor& output, const at::Tensor& input);
  CollectiveHandle ReduceScatterAsync(const at::Tensor& output, const at::Tensor& input);

  // Sets `output` [size * k] to the `input` [k] of all ranks, in their order. `input` may be this
  // rank's shard of `output`. Any type.
  void AllGather(const at::Tensor& output, const at::Tensor& input);
  CollectiveHandle AllGatherAsync(const at::Tensor& output, const at::Tensor& input);

  // Sends the next sent[r] rows of `input` [sum of sent, ...] to each rank r, and sets the next
  // received[r] rows of `output` [sum of received, ...] to those that rank r sends here. `sent` and
  // `received` have an entry per rank. Any type.
  void AllToAll(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& sent,
                const std::vector<int64_t>& received);

  void Broadcast(at::Tensor& tensor, int root);

  // Sends and receives between two ranks match in order. Send may block until its Recv.
  void Send(const at::Tensor& tensor, int to);
  void Recv(at::Tensor& tensor, int from);
  CollectiveHandle SendAsync(const at::Tensor& tensor, int to);
  CollectiveHandle RecvAsync(at::Tensor& tensor, int from);

  void Barrier();

  // Move bytes of any length: the root's to every rank, or every rank's to every rank.
  std::string BroadcastBytes(std::string bytes, int root);
  std::vector<std::string> AllGatherBytes(const std::string& bytes);

  // The volume of this group alone: subgroups count their own.
  CommunicationVolume volume() const { return volume_; }
  void ResetVolume() { volume_ = {}; }
  // The volume of the outermost group and of all groups split off from it: all that this rank has
  // communicated. Thread-safe.
  CommunicationVolume total_volume() const;
  // total_volume().bytes().
  int64_t total_sent_bytes() const { return total_volume().bytes(); }

 private:
  Communicator(std::string name, std::vector<int> ranks, int rank, at::Device device);

  // Runs `body`; an error of it becomes one that names the collective `what`, the ranks, and
  // `peer`, a rank of this group or -1.
  void Run(absl::string_view what, int peer, absl::FunctionRef<void()> body) const;
  void CheckTensor(absl::string_view what, const at::Tensor& tensor) const;
  void CheckPeer(absl::string_view what, int peer) const;
  void CheckShards(absl::string_view what, const at::Tensor& whole, const at::Tensor& shard) const;
  at::Tensor ShardOf(const at::Tensor& whole, int rank) const;
  // Adds a collective of `bytes` to the group's volume and to that of all groups.
  void Count(CollectiveVolume CommunicationVolume::*kind, int64_t bytes);

  // The collectives without checks and without counting. Those that return a function have started
  // all communication; the function waits for it.
  void DoBroadcast(const at::Tensor& tensor, int root);
  std::function<void()> DoAllGather(const at::Tensor& output, const at::Tensor& input);
  std::function<void()> DoReduceScatter(const at::Tensor& output, const at::Tensor& input);
  std::function<void()> AddInRankOrder(const at::Tensor& output, const at::Tensor& input);

  const std::string name_;
  const std::vector<int> ranks_;  // of this group, numbered as in the outermost communicator
  const int rank_;
  const at::Device device_;
  int splits_ = 0;
  CommunicationVolume volume_;
  struct SharedVolume {
    std::mutex mutex;
    CommunicationVolume volume;
  };
  std::shared_ptr<SharedVolume> total_ = std::make_shared<SharedVolume>();
  std::function<void(const std::string&)> on_failure_;
  std::shared_ptr<Communicator> patient_;
  std::shared_ptr<RankStore> store_;     // shared with subgroups; outlives the connections
  std::unique_ptr<ProcessGroup> group_;  // nullptr for a single rank
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_COMMUNICATOR_H_
