#include "common/model/config/freeze.h"

#include <fnmatch.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"

namespace tandem {

absl::StatusOr<std::vector<bool>> TrainableParameters(const std::vector<ParameterSpec>& specs,
                                                      const std::vector<std::string>& freeze) {
  std::vector<bool> trainable;
  for (const ParameterSpec& spec : specs) trainable.push_back(spec.trains);
  for (size_t i = 0; i < freeze.size(); ++i) {
    bool matched = false;
    for (size_t p = 0; p < specs.size(); ++p) {
      if (fnmatch(freeze[i].c_str(), specs[p].name.c_str(), /*flags=*/0) != 0) continue;
      matched = true;
      trainable[p] = false;
    }
    if (!matched) {
      return InvalidField(absl::StrCat("freeze[", i, "]"),
                          absl::StrCat("'", freeze[i], "' matches no parameter of the model"));
    }
  }
  if (std::find(trainable.begin(), trainable.end(), true) == trainable.end()) {
    return InvalidField("freeze", "leaves no parameter to train");
  }
  return trainable;
}

}  // namespace tandem
