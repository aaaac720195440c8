// YAML, environment variables and `dotted.key=value` overrides become a protobuf message; the
// message is the schema.
//
// Keys are field names. Enum values are written by their lower-case short name ("word" for
// SELECTION_STRATEGY_WORD). An unknown key, a duplicate key or a value of the wrong type is
// INVALID_ARGUMENT with the dotted path of the field, and a suggestion where one is close. A name
// of renamed_names.h is an unknown key whose error says the new name. A name of flat_names.h sets
// the nested field that it stands for; a file, or an environment, that has both names of a field is
// INVALID_ARGUMENT.
#ifndef TANDEM_COMMON_CONFIG_CONFIG_H_
#define TANDEM_COMMON_CONFIG_CONFIG_H_

#include <google/protobuf/message.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem::config {

// Merges a YAML document (a map, or empty) into `message`. A list replaces the old one. A key
// without a value leaves the field alone.
absl::Status MergeYaml(absl::string_view yaml, google::protobuf::Message* message);

// The same for a file. NOT_FOUND without it; errors name the file.
absl::Status MergeYamlFile(const std::string& path, google::protobuf::Message* message);

// Applies one override, "optimizer.learning_rate=1e-5"; the value is read as YAML, so
// "tandem.boundary_token_ids=[1, 2]" sets a list.
absl::Status ApplyOverride(absl::string_view assignment, google::protobuf::Message* message);

// Applies an environment variable, "TANDEM__OPTIMIZER__LEARNING_RATE=1e-5": after the prefix the
// key in upper case, "__" for each dot. A variable without the prefix is ignored; an error names
// the variable.
inline constexpr absl::string_view kVariablePrefix = "TANDEM__";
absl::Status ApplyVariable(absl::string_view assignment, google::protobuf::Message* message);

// Where the values of a configuration come from. Later members win.
struct Sources {
  std::string file = {};                    // YAML; "": none
  std::vector<std::string> variables = {};  // NAME=value, all of the process's environment
  std::vector<std::string> overrides = {};  // dotted.key=value, in order
};
absl::Status Load(const Sources& sources, google::protobuf::Message* message);

// Returns an error about a field of the loaded message with the field's flat name, if one of the
// sources calls it so.
absl::Status NameAsWritten(const Sources& sources, const absl::Status& status);

// The message as YAML that MergeYaml reads back: fields in schema order, optional fields that are
// not set and empty lists left out, enums by short name.
std::string ToYaml(const google::protobuf::Message& message);

// "; KEY is now X" for a name of renamed_names.h, "; did you mean \"X\"?" for the field of `type`
// whose name is closest to `key`, or the list of all when none is close.
std::string SuggestField(absl::string_view key, const google::protobuf::Descriptor& type);

// The short name of an enum value: "word" for SELECTION_STRATEGY_WORD.
std::string EnumShortName(const google::protobuf::EnumValueDescriptor& value);

}  // namespace tandem::config

#endif  // TANDEM_COMMON_CONFIG_CONFIG_H_
