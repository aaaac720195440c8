// The kinds of speculators. A kind is found by its name in settings, or by the architecture that a
// published config.json names; the rest of the code asks the kind.
//
// To add one, write a file like mlp_speculator.cc and put its kind into the table of
// speculator_kind.cc; then an adapter like mlp_adapter.cc, which trains it, and put that into the
// table of speculator_adapter.cc. docs/internals/architecture.md has the whole recipe.
#ifndef TANDEM_COMMON_SPECULATOR_SPECULATOR_KIND_H_
#define TANDEM_COMMON_SPECULATOR_SPECULATOR_KIND_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/config/config_fields.h"
#include "common/speculator/speculator.h"

namespace tandem::speculator {

struct SpeculatorKind {
  std::string name;  // in settings
  // In config.json. All have the same files; the first one is written.
  std::vector<std::string> architectures;
  // Before the names of tensors in files that are written. Files are read with and without
  // "speculator.".
  std::string file_prefix;
  // Reads the keys of a config.json, without its architecture, and declares the parameters.
  absl::StatusOr<std::unique_ptr<Speculator>> (*create)(const ConfigFields& fields,
                                                        const SpeculatorOptions& options);
};

// All kinds, in the order in which errors list them.
const std::vector<const SpeculatorKind*>& SpeculatorKinds();

// Adds a kind that lives outside this folder, at the start of a program. It must live as long.
void RegisterSpeculatorKind(const SpeculatorKind& kind);

// Finds a kind by its name or by one of its architectures. UNIMPLEMENTED for `field`, with the list
// of kinds that are there.
absl::StatusOr<const SpeculatorKind*> FindSpeculatorKind(absl::string_view name,
                                                         absl::string_view field);

// Finds the kind of a config.json. INVALID_ARGUMENT or UNIMPLEMENTED for
// "config.json.architectures".
absl::StatusOr<const SpeculatorKind*> KindOfConfig(const ConfigFields& fields);

// Makes a speculator with initial values drawn with `seed`. `fields` are the keys of a config.json,
// from there or from settings; the kind is given, so `architectures` may be missing. Errors of the
// kind.
absl::StatusOr<std::unique_ptr<Speculator>> RandomSpeculator(const SpeculatorKind& kind,
                                                             const ConfigFields& fields,
                                                             uint64_t seed,
                                                             const SpeculatorOptions& options);

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_SPECULATOR_KIND_H_
