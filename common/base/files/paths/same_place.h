// Whether two paths name one place of the file system.
#ifndef TANDEM_COMMON_BASE_FILES_PATHS_SAME_PLACE_H_
#define TANDEM_COMMON_BASE_FILES_PATHS_SAME_PLACE_H_

#include <filesystem>
#include <string>
#include <system_error>

namespace tandem {

// Links are followed; what does not exist is compared by its name.
inline bool SamePlace(const std::string& a, const std::string& b) {
  const auto place = [](const std::string& path) {
    std::error_code error;
    return std::filesystem::weakly_canonical(path, error);
  };
  return place(a) == place(b);
}

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_PATHS_SAME_PLACE_H_
