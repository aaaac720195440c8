#include "services/training_core/checkpoint_writer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/checkpoint/manifest.h"
#include "common/model/compute_setup.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::training {
namespace {

// Priority of the writer: where all cores are busy the engine thread gets most of them.
constexpr int kNiceness = 6;

}  // namespace

class CheckpointWriter::Save {
 public:
  // Whether `other` asks for the same checkpoint.
  bool IsOf(const SaveRequest& other) const {
    return other.expected_version.has_value() &&
           other.expected_version == request.expected_version && other.name == request.name &&
           other.directory == request.directory;
  }

  SaveRequest request;
  std::optional<absl::StatusOr<checkpoint::Saved>> outcome;
};

CheckpointWriter::CheckpointWriter(const std::string& name, absl::Duration stall_limit)
    : thread_({.name = absl::StrCat(name, "-save"),
               .stall_limit = stall_limit,
               .around = [](absl::FunctionRef<void()> loop) {
                 ComputeAlone(at::kCPU);
                 setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
                 loop();
               }}) {}

template <typename Ready>
absl::Status CheckpointWriter::WaitUntil(std::unique_lock<std::mutex>& lock, const CallScope& call,
                                         Ready ready) {
  while (!ready()) {
    TANDEM_RETURN_IF_ERROR(call.Check());
    changed_.wait_until(lock, call.cancellation, call.deadline.ToChrono(), ready);
  }
  return absl::OkStatus();
}

std::optional<absl::StatusOr<checkpoint::Saved>> CheckpointWriter::Join(
    const CallScope& call, const SaveRequest& request) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Save> save = background_;
  if (save == nullptr || !save->IsOf(request)) return std::nullopt;
  if (!save->outcome.has_value() && request.in_background) {
    return checkpoint::Saved{.path = absl::StrCat(request.directory, "/", request.name),
                             .pending = true};
  }
  if (absl::Status left = WaitUntil(lock, call, [&] { return save->outcome.has_value(); });
      !left.ok()) {
    return left;
  }
  if (!save->outcome->ok()) {
    if (background_ == save) background_ = nullptr;
    return save->outcome;
  }
  // Somebody may have removed it since.
  const absl::StatusOr<checkpoint::Manifest> manifest =
      checkpoint::ReadManifest((*save->outcome)->path);
  const bool stands = manifest.ok() && manifest->name == request.name &&
                      manifest->identity.step == *request.expected_version;
  if (!stands) return std::nullopt;
  return save->outcome;
}

absl::StatusOr<std::shared_ptr<CheckpointWriter::Save>> CheckpointWriter::Reserve(
    const CallScope& call) {
  std::unique_lock lock(mutex_);
  TANDEM_RETURN_IF_ERROR(WaitUntil(lock, call, [&] { return current_ == nullptr; }));
  return current_ = std::make_shared<Save>();
}

void CheckpointWriter::Release(const std::shared_ptr<Save>& save) {
  const std::lock_guard lock(mutex_);
  if (current_ == save) current_ = nullptr;
  changed_.notify_all();
}

absl::Status CheckpointWriter::Start(const SaveRequest& request, StartedSave started,
                                     std::shared_ptr<ranks::Communicator> ranks, Done done) {
  std::shared_ptr<Save> save;
  {
    const std::lock_guard lock(mutex_);
    save = current_ != nullptr ? current_ : std::make_shared<Save>();
    save->request = request;
    if (request.in_background) background_ = save;
  }
  const auto finish = [this, save](absl::StatusOr<checkpoint::Saved> saved) {
    const std::lock_guard lock(mutex_);
    save->outcome = std::move(saved);
    if (current_ == save) current_ = nullptr;
    changed_.notify_all();
  };
  // A std::function can be copied, a StartedSave cannot.
  auto held = std::make_shared<StartedSave>(std::move(started));
  absl::Status posted = thread_.Post(
      [held = std::move(held), ranks = std::move(ranks), done = std::move(done), finish]() mutable {
        absl::StatusOr<checkpoint::Saved> saved =
            CatchTorchErrors("checkpoint", [&] { return std::move(*held).Finish(*ranks); });
        held = nullptr;
        done(saved);
        finish(std::move(saved));
      });
  if (!posted.ok()) finish(posted);
  return posted;
}

absl::StatusOr<checkpoint::Saved> CheckpointWriter::Wait(const CallScope& call, const Save& save) {
  std::unique_lock lock(mutex_);
  TANDEM_RETURN_IF_ERROR(WaitUntil(lock, call, [&] { return save.outcome.has_value(); }));
  return *save.outcome;
}

}  // namespace tandem::training
