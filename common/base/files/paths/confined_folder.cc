#include "common/base/files/paths/confined_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/file_descriptor.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr int kFolder = O_PATH | O_DIRECTORY | O_CLOEXEC;

struct OpenFolder {
  std::string path;
  int fd;
};

// The confined folders of this thread, the innermost last.
std::vector<OpenFolder>& OpenFolders() {
  thread_local std::vector<OpenFolder> folders;
  return folders;
}

std::string WithoutSlashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// Returns what follows `folder` in `path`: "" for the folder itself.
std::optional<std::string> Beneath(const std::string& folder, const std::string& path) {
  if (WithoutSlashes(path) == folder) return "";
  const std::string prefix = folder == "/" ? folder : folder + "/";
  if (!path.starts_with(prefix)) return std::nullopt;
  return path.substr(prefix.size());
}

struct Place {
  int folder;
  std::string rest;
};

std::optional<Place> Find(const std::string& path) {
  const std::vector<OpenFolder>& folders = OpenFolders();
  for (auto folder = folders.rbegin(); folder != folders.rend(); ++folder) {
    if (auto rest = Beneath(folder->path, path)) return Place{folder->fd, *std::move(rest)};
  }
  return std::nullopt;
}

std::vector<std::string> Steps(const std::string& path) {
  return absl::StrSplit(path, '/', absl::SkipEmpty());
}

// A link in the place of a folder is ELOOP, though O_DIRECTORY makes it ENOTDIR.
int StepError(int folder, const std::string& step, int error) {
  struct stat found = {};
  const bool is_link =
      ::fstatat(folder, step.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(found.st_mode);
  return is_link ? ELOOP : error;
}

// Opens `steps` one after the other from `folder`, each without following a link, the last with
// `flags`. Returns a descriptor or the negative errno.
int Walk(int folder, const std::vector<std::string>& steps, int flags,
         ConfinedFolder::Missing missing) {
  if (steps.empty()) {
    const int fd = ::openat(folder, ".", flags | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
  }
  int at = folder;
  for (size_t i = 0; i < steps.size(); ++i) {
    const bool is_last = i + 1 == steps.size();
    int fd = -EINVAL;
    if (steps[i] != "." && steps[i] != "..") {
      if (missing == ConfinedFolder::Missing::kIsCreated) ::mkdirat(at, steps[i].c_str(), 0755);
      fd = ::openat(at, steps[i].c_str(), (is_last ? flags : kFolder) | O_NOFOLLOW | O_CLOEXEC,
                    0644);
      if (fd < 0) fd = -StepError(at, steps[i], errno);
    }
    if (at != folder) ::close(at);
    if (fd < 0) return fd;
    at = fd;
  }
  return at;
}

}  // namespace

ConfinedPath ConfinedPath::parent() const {
  const fs::path above = fs::path(WithoutSlashes(path)).parent_path();
  return {above.empty() ? "." : above.string(),
          root.empty() ? "" : (WithoutSlashes(path) == root ? above.string() : root)};
}

absl::StatusOr<ConfinedFolder> ConfinedFolder::Enter(const ConfinedPath& folder, Missing missing) {
  const char* const what = missing == Missing::kIsCreated ? "cannot create" : "cannot open";
  const std::string path = WithoutSlashes(folder.path);
  const std::string& start = folder.root.empty() ? path : folder.root;
  const auto rest = Beneath(WithoutSlashes(start), path);
  if (!rest.has_value()) return FileError(EXDEV, what, path);
  if (missing == Missing::kIsCreated) {
    std::error_code error;
    fs::create_directories(start, error);
    if (error) return FileError(error.value(), what, start);
  }
  const int root = ::open(start.c_str(), kFolder);
  if (root < 0) return FileError(errno, what, path);
  const int fd = Walk(root, Steps(*rest), kFolder, missing);
  ::close(root);
  if (fd < 0) return FileError(-fd, what, path);
  return ConfinedFolder(path, fd);
}

ConfinedFolder::ConfinedFolder(std::string path, int fd) : path_(std::move(path)), fd_(fd) {
  OpenFolders().push_back({path_, fd_});
}

ConfinedFolder::ConfinedFolder(ConfinedFolder&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

ConfinedFolder::~ConfinedFolder() {
  if (fd_ < 0) return;
  std::erase_if(OpenFolders(), [this](const OpenFolder& folder) { return folder.fd == fd_; });
  ::close(fd_);
}

std::string SystemPath(const std::string& path) {
  const std::optional<Place> place = Find(path);
  if (!place.has_value()) return path;
  return absl::StrCat("/proc/self/fd/", place->folder, place->rest.empty() ? "" : "/", place->rest);
}

int OpenConfined(const std::string& path, int flags) {
  const std::optional<Place> place = Find(path);
  if (place.has_value()) {
    return Walk(place->folder, Steps(place->rest), flags, ConfinedFolder::Missing::kIsError);
  }
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  return fd < 0 ? -errno : fd;
}

}  // namespace tandem
