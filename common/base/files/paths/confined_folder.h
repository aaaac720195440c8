// Paths that clients name, used so that nobody who may write beneath a root can lead the server out
// of it.
//
// A path that was checked by name may lead elsewhere when it is opened by name: somebody has put a
// link in the place of a folder. A ConfinedFolder is opened step by step from its root without
// following links, and held open. While it lives, the functions of file_descriptor.h and
// atomic_file.h, called on its thread with paths beneath it, start from the open folder and follow
// no link.
#ifndef TANDEM_COMMON_BASE_FILES_PATHS_CONFINED_FOLDER_H_
#define TANDEM_COMMON_BASE_FILES_PATHS_CONFINED_FOLDER_H_

#include <concepts>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem {

// A path that a client named.
struct ConfinedPath {
  ConfinedPath() = default;
  // A path that no root confines: text, or a std::filesystem::path.
  template <std::convertible_to<std::string> Named>
  ConfinedPath(const Named& named) {  // NOLINT: implicit
    std::string text = named;
    path = std::move(text);
  }
  ConfinedPath(std::string named, std::string within)
      : path(std::move(named)), root(std::move(within)) {}

  // The folder that holds it: of a root itself, the operator's folder above it.
  ConfinedPath parent() const;

  std::string path;
  // The root that holds `path`; both are then canonical. Empty: nothing confines it.
  std::string root;
};

class ConfinedFolder {
 public:
  enum class Missing { kIsError, kIsCreated };

  // Opens the folder, and creates what is missing of it if asked to. NOT_FOUND;
  // FAILED_PRECONDITION where a link has taken the place of a folder beneath the root; else as
  // FileError says (file_descriptor.h).
  static absl::StatusOr<ConfinedFolder> Enter(const ConfinedPath& folder, Missing missing);
  ConfinedFolder(ConfinedFolder&& other) noexcept;
  ConfinedFolder& operator=(ConfinedFolder&&) = delete;
  ~ConfinedFolder();

 private:
  ConfinedFolder(std::string path, int fd);

  std::string path_;
  int fd_;
};

// Returns the path by which the system finds `path`, for calls that take no descriptor
// (std::filesystem, rename(2)): that of the open folder, or `path` itself if it lies beneath no
// ConfinedFolder of this thread. It is for no message.
std::string SystemPath(const std::string& path);

// open(2) with these flags and mode 0644: beneath a ConfinedFolder of this thread from the open
// folder, without following links (ELOOP). Returns a descriptor, or the negative errno.
int OpenConfined(const std::string& path, int flags);

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_PATHS_CONFINED_FOLDER_H_
