// A WeightReceiver (weight_transfer.h) that hands the tensors of an update to the engine while they
// come, beside the weights that serve. It knows bytes, names and shapes; the engine makes weights
// of them, and puts those in force.
#ifndef TANDEM_COMMON_WEIGHTS_STAGED_WEIGHT_RECEIVER_H_
#define TANDEM_COMMON_WEIGHTS_STAGED_WEIGHT_RECEIVER_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/weights/tensor_stager.h"
#include "common/weights/weight_transfer.h"
#include "common/weights/word_sums.h"

namespace tandem {

// A component beside the model that a receiver takes.
struct ReceivedComponent {
  std::string name;                    // in kWeightComponents
  std::string config;                  // as ComponentManifest::config
  std::vector<WeightSpec> parameters;  // with their names in an update
  WeightsVersion initial;
};

// The adapters of a model of which an update brings nothing else.
struct ReceivedAdapter {
  std::string settings;  // as WeightManifest::adapter; empty: the model has none
  TensorSums kept;       // of the rest of the model, which stays
};

// A tensor whose bytes the engine has read itself.
struct ReadTensor {
  std::string name;
  WordSums sums;                                     // of its bytes as they travelled
  std::optional<int64_t> not_finite = std::nullopt;  // the first value that is infinite or NaN
};

// The engine's part of one update. It is destroyed when the update has ended, in force or not.
class NextWeights {
 public:
  virtual ~NextWeights() = default;
  // Takes the next tensor of the manifest, on a thread of the update's own. Its error ends the
  // update.
  virtual absl::Status Add(const WeightSpec& spec, TensorBytes bytes) = 0;
  // The same for a tensor whose bytes are in memory of a sender's GPU, one range behind the other,
  // where the engine gave the receiver an OpenGpu. The engine reads them beside what follows, and
  // TakeRead says what it has read.
  virtual absl::Status AddShared(const WeightSpec&, absl::Span<const SharedRange>) {
    return absl::UnimplementedError("this update takes no memory of a GPU");
  }
  // Waits for the tensors of AddShared, and returns each of them once. Apply may read them again.
  virtual absl::StatusOr<std::vector<ReadTensor>> TakeRead() { return std::vector<ReadTensor>(); }
  // Puts the weights in force, after all tensors have been added and the digest has been verified;
  // blocks. After CANCELLED or DEADLINE_EXCEEDED it may be called again; another error ends the
  // update.
  virtual absl::Status Apply(const WeightManifest& manifest, const CallScope& call) = 0;
};

class StagedWeightReceiver : public WeightReceiver {
 public:
  // Makes the engine's part of an update.
  using Start = std::function<std::unique_ptr<NextWeights>()>;
  // As WeightReceiver::OpenGpuMemory; the result is on_gpu().
  using OpenGpu = std::function<absl::StatusOr<std::shared_ptr<const SharedBytes>>(
      absl::Span<const GpuMemory> memories)>;

  // `parameters` has the name and shape of every parameter of the model, and the type in which the
  // receiver wants it. `optional` is a parameter that a manifest may leave out (a tied head).
  // `num_token_ids`: those of the model, which a sender's model must have too. An
  // update may leave out any of `components`, which then stays. `allow_not_finite`: weights that
  // hold a value that is infinite or NaN are served, too. `adapter`: of the model whose
  // `parameters` are those of its adapters. `open_gpu` is null where the engine cannot read memory
  // of a GPU.
  StagedWeightReceiver(std::vector<WeightSpec> parameters, std::optional<WeightSpec> optional,
                       int64_t num_token_ids, WeightsVersion initial, Start start,
                       std::vector<ReceivedComponent> components = {},
                       bool allow_not_finite = false, ReceivedAdapter adapter = {},
                       OpenGpu open_gpu = nullptr);

  absl::StatusOr<int64_t> Begin(const std::string& update_id, const WeightManifest& manifest,
                                bool allow_rollback) override;
  absl::StatusOr<int64_t> Append(const std::string& update_id, int64_t chunk_index,
                                 absl::Span<const std::byte> data) override;
  absl::StatusOr<int64_t> AppendShared(const std::string& update_id, int64_t chunk_index,
                                       const std::shared_ptr<const SharedBytes>& bytes,
                                       absl::Span<const FileRange> ranges) override;
  absl::StatusOr<WeightsVersion> Commit(const std::string& update_id,
                                        const CallScope& call) override;
  absl::Status Abort(const std::string& update_id) override;
  WeightsVersion Version() const override;
  std::optional<WeightsVersion> ComponentVersion(absl::string_view name) const override;
  std::string OpenUpdateId() const override;
  void DropAbandoned(SteadyTime now) override;
  TensorTypes WantedTypes() const override;
  bool ReadsGpuMemory() const override { return open_gpu_ != nullptr; }
  absl::StatusOr<std::shared_ptr<const SharedBytes>> OpenGpuMemory(
      absl::Span<const GpuMemory> memories) override {
    return open_gpu_ != nullptr ? open_gpu_(memories) : WeightReceiver::OpenGpuMemory(memories);
  }

 private:
  struct Update {
    // `kept`: sums of what the manifest's digest covers and no tensor brings.
    Update(std::string id, const WeightManifest& manifest, std::unique_ptr<NextWeights> weights,
           bool allow_not_finite, const TensorSums& kept);

    const std::string id;
    const WeightManifest manifest;
    // Guarded by the receiver's mutex.
    bool committing = false;
    int64_t commits = 0;                       // calls of Commit
    SteadyTime last_call = SteadyTime::Now();  // of the sender

    // Held while a chunk is taken, which may wait for tensors to be added.
    std::mutex stream_mutex;
    int64_t received = 0;  // bytes, always a number of whole chunks

    // Used by the stager's thread, and once all tensors have been taken by Commit.
    std::array<TensorSums, kWeightComponents.size()> sums;
    const std::unique_ptr<NextWeights> weights;
    TensorStager stager;  // last: it uses `weights`

    int64_t next_chunk() const {
      return (received + manifest.chunk_bytes - 1) / manifest.chunk_bytes;
    }
  };

  absl::Status CheckManifest(const WeightManifest& manifest) const;
  // Returns the receiver's component for one of a manifest, whose tensors are not checked. Errors
  // are fields of `path`.
  absl::StatusOr<const ReceivedComponent*> FindComponent(const std::string& path,
                                                         const ComponentManifest& manifest) const;
  // Whether the manifest's model is in force, and its other components.
  bool ServesModelLocked(const WeightManifest& manifest) const;
  bool ServesComponentsLocked(const WeightManifest& manifest) const;
  absl::StatusOr<std::shared_ptr<Update>> FindOpenLocked(const std::string& update_id);
  // Returns ABORTED, or NOT_FOUND for an id that no other update has replaced.
  absl::Status NotOpenLocked(const std::string& update_id) const;
  // Appends a chunk of `size` bytes, which `write` gives to the stager.
  absl::StatusOr<int64_t> AppendChunk(const std::string& update_id, int64_t chunk_index,
                                      int64_t size,
                                      absl::FunctionRef<void(TensorStager& stager)> write);
  // OK if the whole stream was received.
  static absl::Status CheckReceived(Update& update);
  // Waits for the tensors that the engine reads itself, and adds their sums. OK if all tensors have
  // the manifest's digests and these may be served.
  absl::Status CheckRead(Update& update) const;
  // OK if the tensors, all of which have been taken, have the manifest's digests.
  static absl::Status CheckDigests(const Update& update);

  const std::vector<WeightSpec> parameters_;
  const std::optional<WeightSpec> optional_;
  const int64_t num_token_ids_;
  const Start start_;
  const std::vector<ReceivedComponent> components_;
  const bool allow_not_finite_;
  const ReceivedAdapter adapter_;
  const OpenGpu open_gpu_;

  mutable std::mutex mutex_;
  std::condition_variable_any commit_changed_;
  std::shared_ptr<Update> open_;
  WeightsVersion version_;
  std::map<std::string, WeightsVersion, std::less<>> component_versions_;  // of components_
  std::string last_committed_id_;
  // The update that a rollback replaced, until a higher version is committed. Its sender, of the
  // former run, may not know of the rollback yet.
  std::string overtaken_id_;
  // The last updates that another one has replaced, each with what replaced it.
  std::deque<std::pair<std::string, std::string>> replaced_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_STAGED_WEIGHT_RECEIVER_H_
