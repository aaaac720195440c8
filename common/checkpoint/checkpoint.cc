#include "common/checkpoint/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/checkpoint/replace_directory.h"

namespace tandem::checkpoint {
namespace {

namespace fs = std::filesystem;

// OK if nothing is at `target`, or an earlier checkpoint of this kind that was saved there.
absl::Status CheckReplaceable(const fs::path& target, const std::string& kind) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(SystemPath(target.string()), ignored)))
    return absl::OkStatus();
  TANDEM_RETURN_IF_ERROR(CheckOwned(target, target.filename().string()));
  const absl::StatusOr<Manifest> manifest = ReadManifest(target);
  if (manifest.ok() && manifest->identity.kind == kind) return absl::OkStatus();
  return FieldError(absl::StatusCode::kAlreadyExists, "name",
                    absl::StrCat(target.string(), " exists and is not a checkpoint of a ", kind));
}

// FAILED_PRECONDITION if `directory` is a path of `in_use`, or holds one.
absl::Status CheckNotInUse(const std::string& directory, const std::vector<std::string>& in_use) {
  std::error_code ignored;
  const fs::path outer = fs::weakly_canonical(directory, ignored);
  for (const std::string& path : in_use) {
    if (path.empty()) continue;
    const fs::path inner = fs::weakly_canonical(path, ignored);
    if (std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first ==
        outer.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat("keeping ", directory, ": ", path, " is in use"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckName(const std::string& name) {
  if (IsPlainName(name)) return absl::OkStatus();
  return InvalidField("name", "must be a plain file name that does not start with a dot");
}

absl::StatusOr<PendingCheckpoint> PendingCheckpoint::Begin(const std::string& parent,
                                                           const std::string& name,
                                                           const Identity& identity) {
  TANDEM_RETURN_IF_ERROR(CheckName(name));
  TANDEM_RETURN_IF_ERROR(CheckGiven("directory", parent));
  const fs::path target = fs::path(parent) / name;
  TANDEM_RETURN_IF_ERROR(RecoverDirectory(target.string()));
  TANDEM_RETURN_IF_ERROR(CheckReplaceable(target, identity.kind));
  absl::StatusOr<TemporaryDirectory> temporary = TemporaryDirectory::Create(parent, name);
  if (!temporary.ok()) return PrependFieldPath("directory", temporary.status());
  return PendingCheckpoint(target.string(), identity, *std::move(temporary));
}

absl::StatusOr<Saved> PendingCheckpoint::Commit(const std::vector<WrittenFile>& files) && {
  const TemporaryDirectory written = std::move(temporary_);
  TANDEM_ASSIGN_OR_RETURN(
      const int64_t bytes,
      WriteManifest(written.path(), fs::path(target_).filename().string(), identity_, files));
  // Again: the directory may have changed while the files were written.
  TANDEM_RETURN_IF_ERROR(CheckReplaceable(target_, identity_.kind));
  TANDEM_RETURN_IF_ERROR(ReplaceDirectory(written.path(), target_));
  return Saved{.path = target_, .bytes = bytes};
}

absl::StatusOr<Saved> Save(
    const std::string& parent, const std::string& name, const Identity& identity,
    absl::FunctionRef<absl::Status(const std::string& directory)> write_files) {
  TANDEM_ASSIGN_OR_RETURN(PendingCheckpoint pending,
                          PendingCheckpoint::Begin(parent, name, identity));
  WrittenFiles written;
  TANDEM_RETURN_IF_ERROR(write_files(pending.directory()));
  return std::move(pending).Commit(written.Take());
}

absl::Status Verify(const std::string& path) {
  TANDEM_RETURN_IF_ERROR(RecoverDirectory(path));
  TANDEM_ASSIGN_OR_RETURN(const ConfinedFolder folder, OpenToVerify(path));
  return VerifyShare(path, 0, 1);
}

absl::StatusOr<ConfinedFolder> OpenToVerify(const ConfinedPath& path) {
  absl::StatusOr<ConfinedFolder> folder =
      ConfinedFolder::Enter(path, ConfinedFolder::Missing::kIsError);
  if (folder.ok() || folder.status().code() == absl::StatusCode::kFailedPrecondition) return folder;
  return absl::NotFoundError(absl::StrCat("no checkpoint directory ", path.path));
}

absl::Status VerifyShare(const std::string& path, int rank, int ranks) {
  TANDEM_ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(path));
  return VerifyFiles(path, manifest, rank, ranks);
}

std::vector<Listed> List(const std::string& parent) {
  std::vector<Listed> listed;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(SystemPath(parent), error)) {
    const std::string name = entry.path().filename().string();
    if (!IsPlainName(name) || entry.is_symlink(error)) continue;
    const fs::path path = fs::path(parent) / name;
    const absl::StatusOr<Manifest> manifest = ReadManifest(path);
    if (manifest.ok() && manifest->name == name) {
      listed.push_back({path.string(), manifest->identity});
    }
  }
  std::sort(listed.begin(), listed.end(), [](const Listed& a, const Listed& b) {
    return std::tie(a.identity.step, a.path) < std::tie(b.identity.step, b.path);
  });
  return listed;
}

absl::Status Prune(const std::string& just_saved, const Identity& identity, int64_t keep,
                   const std::vector<std::string>& in_use) {
  TANDEM_RETURN_IF_ERROR(CheckAtLeast("keep", keep, 0));
  if (keep == 0) return absl::OkStatus();
  std::vector<std::string> others;
  for (const Listed& listed : List(fs::path(just_saved).parent_path().string())) {
    if (listed.path == just_saved || listed.identity.kind != identity.kind ||
        listed.identity.run_id != identity.run_id) {
      continue;
    }
    absl::Status removable = CheckOwned(listed.path, fs::path(listed.path).filename().string());
    if (removable.ok()) removable = CheckNotInUse(listed.path, in_use);
    if (removable.ok()) {
      others.push_back(listed.path);
    } else {
      Log(LogLevel::kWarning, "checkpoint_not_pruned", {{"reason", removable.message()}});
    }
  }
  const auto kept = static_cast<size_t>(keep - 1);
  for (size_t i = 0; i + kept < others.size(); ++i) {
    TANDEM_RETURN_IF_ERROR(RemoveDirectory(others[i]));
  }
  return absl::OkStatus();
}

}  // namespace tandem::checkpoint
