// The directory of a speculator: config.json and model.safetensors, in the layouts of the published
// ones.
#ifndef TANDEM_COMMON_SPECULATOR_SPECULATOR_FILES_H_
#define TANDEM_COMMON_SPECULATOR_SPECULATOR_FILES_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/speculator/speculator.h"
#include "common/tensor/aten/named_tensors.h"
#include "common/tensor/dtype.h"

namespace tandem::speculator {

// Loads a speculator. Names of tensors may begin with "speculator." or not. Tied tensors may be
// stored once, under any of their names, or under several with the same values. INVALID_ARGUMENT
// that names the field of config.json, or file and tensor when one is missing, unexpected,
// mis-shaped, not floating-point, or differs from those tied to it; DATA_LOSS and INVALID_ARGUMENT
// for broken files; NOT_FOUND; UNIMPLEMENTED for an architecture that is not there, and for a
// directory whose weights are in pytorch_model.bin alone.
absl::StatusOr<std::unique_ptr<Speculator>> LoadSpeculator(const std::string& directory,
                                                           const SpeculatorOptions& options);

// Reads config.json alone: the parameters have no memory, and files of weights need not be there.
// Errors as LoadSpeculator, but for those of weights.
absl::StatusOr<std::unique_ptr<Speculator>> DeclareSpeculator(const std::string& directory,
                                                              const SpeculatorOptions& options);

// The contents of such a directory: tensors that share memory with the speculator, unless they are
// replaced, and the keys of config.json.
struct SpeculatorFiles {
  NamedTensors tensors;
  nlohmann::json config;
};
SpeculatorFiles FilesOf(const Speculator& speculator);

// Writes such a directory, with tied tensors under all of their names as the reference
// implementations have them, and config.json with the keys that it was read with. Each file is
// replaced atomically.
absl::Status SaveSpeculator(const Speculator& speculator, const std::string& directory,
                            DType dtype = DType::kFloat32);

absl::Status SaveSpeculator(const SpeculatorFiles& files, const std::string& directory,
                            DType dtype = DType::kFloat32);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_SPECULATOR_FILES_H_
