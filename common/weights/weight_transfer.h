// How new weights reach a server that generates: the two ends of a transfer, as plain interfaces.
//
// A transfer has two phases, so that a receiver serves the old weights until it holds all of the
// new ones, and goes from one to the other between two decode steps:
//
//   sender (trainer)                                  receiver (rollout server)
//   WeightSource: an immutable copy     Begin ──────► opens an update: checks the manifest, and
//   and its manifest                         ◄─────── answers with the first chunk that it lacks
//                                       Append ─────► phase 1: a byte stream of chunks, received
//                                       …             beside the weights that serve; the engine
//                                                     takes each tensor as it is complete
//                                       Commit ─────► phase 2: verifies the digest, swaps at the
//                                            ◄─────── next step boundary, answers with its version
//
// A sender that was interrupted calls Begin with the same update id, and goes on at the chunk that
// the receiver lacks. Nothing is served of an update before its Commit; Abort drops it.
//
// A receiver on the sender's machine reads the chunks' bytes in the file of the sender's copy
// (docs/adr/0118), or copies them from the memory of the sender's GPUs (docs/adr/0128, 0129), and
// only their places travel.
//
// A receiver says in which types it keeps tensors. What it keeps in bfloat16 travels in bfloat16,
// rounded by the sender as the receiver would (docs/adr/0091); the rest travels in float32.
//
// An update has components (weight_components.h): the model, and behind it in the same stream
// others that are served with it, such as its speculator (common/speculator). A receiver is sent
// those that it has.
//
// The files of a transfer:
//   weight_components.h         the table of components
//   weight_snapshot.h           the trainer's copy of its weights in a file
//   gpu/gpu_snapshot.h          the same in memory of GPUs: of gpu_copy.h, one for each rank
//   word_sums.h                 the digest by which both ends recognise weights
//   weights_digest.h            the same of tensors, wherever they are
//   staged_weight_receiver.h    the receiver up to the swap, without tensors
//   tensor_stager.h             cuts the stream into tensors, for a thread that takes them
//   common/rpc/transfer/weight_sender.h, weight_receiver_service.h    the same over
//   tandem.weights.v1 services/trainer/service/publish.h           one snapshot to many receivers
//   services/rollout/engine/ranks/shard_weights.h      from rank 0 of a receiver to its other ranks
#ifndef TANDEM_COMMON_WEIGHTS_WEIGHT_TRANSFER_H_
#define TANDEM_COMMON_WEIGHTS_WEIGHT_TRANSFER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/base/call_scope.h"
#include "common/base/files/file_descriptor.h"
#include "common/base/files/shared_bytes.h"
#include "common/base/machine/gpu_memory.h"
#include "common/base/steady_time.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/weight_components.h"
#include "common/weights/weights_version.h"
#include "common/weights/word_sums.h"

namespace tandem {

// A sender that lives sends chunks, or asks again, within a few minutes.
inline constexpr absl::Duration kAbandonedAfter = absl::Minutes(10);

// The types in which a receiver wants tensors of the model, by name: float32 without an entry.
using TensorTypes = std::map<std::string, DType>;

// Consecutive bytes of a file, or of shared memory.
struct FileRange {
  int64_t offset, size;
};

// A component of an update beside the model.
struct ComponentManifest {
  std::string name;    // in kWeightComponents
  std::string config;  // its kind and settings as text, equal at both ends
  std::string digest;  // of its tensors, as WeightManifest::digest

  bool operator==(const ComponentManifest&) const = default;
};

// Describes an update. The tensors' bytes, little endian and concatenated in this order, form one
// byte stream, which travels in chunks. They come component by component, in the order of
// kWeightComponents. An update may leave out all tensors of the model where the receiver serves
// that model already: then it brings the version, and the other components if it has any.
struct WeightManifest {
  int64_t version = 0;
  std::vector<WeightSpec> tensors;
  int64_t total_bytes = 0;
  int64_t chunk_bytes = 1 << 20;  // of every chunk but the last, which may be shorter
  // Digest of the model's tensors as float32 (TensorSums::Digest), 32 hexadecimal digits: the same
  // in every order and type, with other components and without.
  std::string digest;
  int64_t num_token_ids = 0;  // of the model: the rows of its vocabulary that have a token
  std::vector<ComponentManifest> components = {};  // beside the model, no name twice
  // Digest of the model's tensors as they travel; empty: `digest`, as where all are float32.
  std::string sent_digest = {};
  // Rank and scale of the model's adapters, whose tensors are all that is sent of the model; empty:
  // it has none.
  std::string adapter = {};

  bool operator==(const WeightManifest&) const = default;

  bool has_model() const {
    return !tensors.empty() && ComponentOf(tensors.front()) == kModelComponent;
  }
  // Returns a component beside the model, or nullptr.
  const ComponentManifest* Find(absl::string_view component) const {
    const auto found = std::ranges::find(components, component, &ComponentManifest::name);
    return found == components.end() ? nullptr : &*found;
  }
  // Returns the manifest without a component and its tensors. The digest of the model stays.
  WeightManifest Without(absl::string_view component) const {
    WeightManifest rest = *this;
    std::erase_if(rest.components, [&](const auto& other) { return other.name == component; });
    std::erase_if(rest.tensors, [&](const WeightSpec& tensor) {
      if (ComponentOf(tensor) != component) return false;
      rest.total_bytes -= tensor.bytes();
      return true;
    });
    return rest;
  }

  // Returns the bytes that the tensors take as float32, whatever the types that they are there in.
  int64_t float32_bytes() const {
    int64_t bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (i > 0 && tensors[i].name == tensors[i - 1].name) continue;
      bytes += WeightSpec{.name = "", .shape = tensors[i].shape}.bytes();
    }
    return bytes;
  }

  int64_t num_chunks() const { return (total_bytes + chunk_bytes - 1) / chunk_bytes; }
};

// An immutable copy of a model's weights, for receivers that want them in different types.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // Describes all that can be sent: a tensor may be there in several types, one behind the other.
  // There is no sent_digest, which depends on the receiver.
  virtual const WeightManifest& manifest() const = 0;
  // Returns the sums of each of the manifest's tensors; empty if all tensors are float32.
  virtual absl::Span<const WordSums> sums() const { return {}; }
  // Copies the stream's bytes [offset, offset + out.size()); the range must lie inside the stream.
  // Thread-safe. Errors are those of the file that holds the copy.
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> out) const = 0;
  // Returns the file, without a name, that holds the stream; nullptr if none does.
  virtual const FileDescriptor* file() const { return nullptr; }
  // Returns the memories of GPUs that hold the stream, one behind the other; none if none do.
  virtual absl::Span<const GpuMemory> gpu_memories() const { return {}; }
};

// Takes one update at a time. Thread-safe. The served weights change in Commit alone.
class WeightReceiver {
 public:
  virtual ~WeightReceiver() = default;
  // Opens an update, or continues the open one of that id and manifest. Returns the index of the
  // first chunk that is missing: num_chunks() where the manifest's weights are served already, so
  // that nothing is left to send and Commit returns at once. INVALID_ARGUMENT names a tensor that
  // does not fit the model, or has a type that the receiver does not want, or a component that the
  // receiver does not have or has another one of.
  // FAILED_PRECONDITION (reason VOCABULARY_MISMATCH) for another number of token ids than the
  // model's; (reason STALE_WEIGHT_VERSION) for a version that is not above the
  // served one, or is below that of another open update; an open update of a lower version is
  // replaced. INVALID_ARGUMENT for "manifest.tensors" without the model's where another model is
  // served. `allow_rollback` accepts such a version; the update that it replaces can be begun
  // again with `allow_rollback` alone. The served version may come again with other components.
  virtual absl::StatusOr<int64_t> Begin(const std::string& update_id,
                                        const WeightManifest& manifest, bool allow_rollback) = 0;
  // Takes the next chunk, and returns the index of the one after it. NOT_FOUND for an update that
  // is not open, ABORTED (reason UPDATE_REPLACED) if another one has replaced it; INVALID_ARGUMENT
  // names chunk_index (reason CHUNK_OUT_OF_ORDER) or data, of a wrong length.
  virtual absl::StatusOr<int64_t> Append(const std::string& update_id, int64_t chunk_index,
                                         absl::Span<const std::byte> data) = 0;
  // The same for a chunk whose bytes the sender shares, one range behind the other. They are read
  // beside what comes next; an error of reading is one of Commit.
  virtual absl::StatusOr<int64_t> AppendShared(const std::string& update_id, int64_t chunk_index,
                                               const std::shared_ptr<const SharedBytes>& bytes,
                                               absl::Span<const FileRange> ranges) = 0;
  // Verifies the digest, puts the weights in force at the next step boundary, and blocks until
  // then. DATA_LOSS, or FAILED_PRECONDITION (reason WEIGHTS_NOT_FINITE) for weights with a value
  // that is infinite or NaN, leave the old weights in place and drop the update. A call that ends
  // before its turn (DEADLINE_EXCEEDED, CANCELLED) leaves the update open. Repeating the last
  // commit is OK. Of several calls for one update the first commits and the last waits for it; the
  // others return UNAVAILABLE. Errors of an update that is not open as in Append.
  virtual absl::StatusOr<WeightsVersion> Commit(const std::string& update_id,
                                                const CallScope& call) = 0;
  // Drops an update. Errors of an update that is not open as in Append.
  virtual absl::Status Abort(const std::string& update_id) = 0;
  // Drops the open update if its sender has not called for kAbandonedAfter. Called now and then.
  virtual void DropAbandoned(SteadyTime) {}
  // Returns the types in which the receiver wants tensors, for as long as it lives. All of them may
  // be sent as float32.
  virtual TensorTypes WantedTypes() const { return {}; }
  // Whether the receiver may read memory of another process's GPU, if that is on its machine.
  virtual bool ReadsGpuMemory() const { return false; }
  // Opens such memories, one behind the other, for AppendShared. UNIMPLEMENTED unless
  // ReadsGpuMemory(); else an error says why the receiver cannot read one of them.
  virtual absl::StatusOr<std::shared_ptr<const SharedBytes>> OpenGpuMemory(
      absl::Span<const GpuMemory>) {
    return absl::UnimplementedError("the weights of this server are not on one GPU");
  }
  // Returns the version of the model that is served.
  virtual WeightsVersion Version() const = 0;
  // Returns the version of a component beside the model, which is older than the model's where
  // updates came without it; nullopt for a receiver that does not take it.
  virtual std::optional<WeightsVersion> ComponentVersion(absl::string_view) const {
    return std::nullopt;
  }
  // Returns the id of the open update, or an empty string.
  virtual std::string OpenUpdateId() const = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_WEIGHT_TRANSFER_H_
