#include "common/config/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/base/atomic_file.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem::config {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

// Deeper documents are refused: no schema needs them, and recursion must end.
constexpr int kMaxDepth = 32;
constexpr size_t kMaxFileBytes = 1 << 20;

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

// "; did you mean X?" for the closest candidate, or the list of all when none is close.
std::string Suggest(absl::string_view given, const std::vector<std::string>& candidates) {
  const std::string* best = nullptr;
  size_t best_distance = std::max<size_t>(2, given.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = given.size() > 64 ? best_distance : EditDistance(given, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = &candidate;
    }
  }
  if (best != nullptr) return absl::StrCat("; did you mean \"", *best, "\"?");
  return absl::StrCat("; known: ", absl::StrJoin(candidates, ", "));
}

std::vector<std::string> FieldNames(const Descriptor& descriptor) {
  std::vector<std::string> names;
  for (int i = 0; i < descriptor.field_count(); ++i) names.push_back(descriptor.field(i)->name());
  return names;
}

// "SELECTION_STRATEGY_", from the zero value SELECTION_STRATEGY_UNSPECIFIED.
std::string EnumPrefix(const EnumDescriptor& type) {
  absl::string_view zero = type.value(0)->name();
  if (absl::EndsWith(zero, "UNSPECIFIED")) zero.remove_suffix(sizeof("UNSPECIFIED") - 1);
  return std::string(zero);
}

std::string Join(absl::string_view path, absl::string_view key) {
  return path.empty() ? std::string(key) : absl::StrCat(path, ".", key);
}

std::string Shorten(const std::string& text) {
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

const char* TypeName(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_STRING:
      return "text";
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_FLOAT:
      return "a number";
    case FieldDescriptor::CPPTYPE_ENUM:
      return "a name";
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return "a map";
    default:
      return "an integer";
  }
}

// Sets or adds one scalar.
class ScalarWriter {
 public:
  ScalarWriter(Message* message, const FieldDescriptor* field)
      : message_(message), field_(field), reflection_(message->GetReflection()) {}

  absl::Status Write(const YAML::Node& node, const std::string& path) {
    if (!node.IsScalar()) return WrongType(path, node.IsMap() ? "a map" : "a list");
    const std::string& text = node.Scalar();
    const bool quoted = node.Tag() == "!";
    if (quoted && field_->cpp_type() != FieldDescriptor::CPPTYPE_STRING &&
        field_->cpp_type() != FieldDescriptor::CPPTYPE_ENUM) {
      return WrongType(path, absl::StrCat("the text \"", Shorten(text), "\""));
    }
    switch (field_->cpp_type()) {
      case FieldDescriptor::CPPTYPE_BOOL:
        if (text != "true" && text != "false") return WrongType(path, Shorten(text));
        Put(&Reflection::SetBool, &Reflection::AddBool, text == "true");
        return absl::OkStatus();
      case FieldDescriptor::CPPTYPE_INT32:
        return Integer<int32_t>(text, path, &Reflection::SetInt32, &Reflection::AddInt32);
      case FieldDescriptor::CPPTYPE_INT64:
        return Integer<int64_t>(text, path, &Reflection::SetInt64, &Reflection::AddInt64);
      case FieldDescriptor::CPPTYPE_UINT32:
        return Integer<uint32_t>(text, path, &Reflection::SetUInt32, &Reflection::AddUInt32);
      case FieldDescriptor::CPPTYPE_UINT64:
        return Integer<uint64_t>(text, path, &Reflection::SetUInt64, &Reflection::AddUInt64);
      case FieldDescriptor::CPPTYPE_DOUBLE:
      case FieldDescriptor::CPPTYPE_FLOAT: {
        double value = 0;
        if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) {
          return WrongType(path, Shorten(text));
        }
        if (field_->cpp_type() == FieldDescriptor::CPPTYPE_FLOAT) {
          Put(&Reflection::SetFloat, &Reflection::AddFloat, static_cast<float>(value));
        } else {
          Put(&Reflection::SetDouble, &Reflection::AddDouble, value);
        }
        return absl::OkStatus();
      }
      case FieldDescriptor::CPPTYPE_STRING:
        if (field_->is_repeated()) {
          reflection_->AddString(message_, field_, text);
        } else {
          reflection_->SetString(message_, field_, text);
        }
        return absl::OkStatus();
      case FieldDescriptor::CPPTYPE_ENUM:
        return Enum(text, path);
      case FieldDescriptor::CPPTYPE_MESSAGE:
        break;
    }
    return absl::InternalError("not a scalar field");
  }

 private:
  absl::Status WrongType(const std::string& path, absl::string_view got) const {
    return InvalidField(path, absl::StrCat("expected ", TypeName(*field_), ", got ", got));
  }

  template <typename Set, typename Add, typename T>
  void Put(Set set, Add add, T value) {
    if (field_->is_repeated()) {
      (reflection_->*add)(message_, field_, value);
    } else {
      (reflection_->*set)(message_, field_, value);
    }
  }

  template <typename T, typename Set, typename Add>
  absl::Status Integer(const std::string& text, const std::string& path, Set set, Add add) {
    T value = 0;
    if (!absl::SimpleAtoi(text, &value)) {
      double number = 0;
      if (absl::SimpleAtod(text, &number) && number == std::floor(number)) {
        return InvalidField(
            path, absl::StrCat("must be an integer from ", std::numeric_limits<T>::min(), " to ",
                               std::numeric_limits<T>::max(), ", got ", text));
      }
      return WrongType(path, Shorten(text));
    }
    Put(set, add, value);
    return absl::OkStatus();
  }

  absl::Status Enum(const std::string& text, const std::string& path) {
    const EnumDescriptor& type = *field_->enum_type();
    std::vector<std::string> names;
    for (int i = 0; i < type.value_count(); ++i) {
      const EnumValueDescriptor* value = type.value(i);
      if (value->number() == 0) continue;
      names.push_back(EnumShortName(*value));
      if (names.back() == text) {
        Put(&Reflection::SetEnumValue, &Reflection::AddEnumValue, value->number());
        return absl::OkStatus();
      }
    }
    return InvalidField(
        path, absl::StrCat("unknown value \"", Shorten(text), "\"", Suggest(text, names)));
  }

  Message* message_;
  const FieldDescriptor* field_;
  const Reflection* reflection_;
};

absl::Status MergeMap(const YAML::Node& node, const std::string& path, int depth, Message* message);

absl::Status MergeField(const YAML::Node& node, const std::string& path, int depth,
                        const FieldDescriptor* field, Message* message) {
  const Reflection* reflection = message->GetReflection();
  if (!node.IsDefined() || node.IsNull()) return absl::OkStatus();
  const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  if (!field->is_repeated()) {
    if (is_message) {
      return MergeMap(node, path, depth + 1, reflection->MutableMessage(message, field));
    }
    return ScalarWriter(message, field).Write(node, path);
  }
  if (!node.IsSequence()) {
    return InvalidField(path, absl::StrCat("expected a list, got ",
                                           node.IsMap() ? "a map" : Shorten(node.Scalar())));
  }
  reflection->ClearField(message, field);
  for (size_t i = 0; i < node.size(); ++i) {
    const std::string item_path = absl::StrCat(path, "[", i, "]");
    if (is_message) {
      TANDEM_RETURN_IF_ERROR(
          MergeMap(node[i], item_path, depth + 1, reflection->AddMessage(message, field)));
    } else {
      TANDEM_RETURN_IF_ERROR(ScalarWriter(message, field).Write(node[i], item_path));
    }
  }
  return absl::OkStatus();
}

absl::Status MergeMap(const YAML::Node& node, const std::string& path, int depth,
                      Message* message) {
  if (depth > kMaxDepth) return InvalidField(path, "nested too deeply");
  if (!node.IsDefined() || node.IsNull()) return absl::OkStatus();
  if (!node.IsMap()) {
    return InvalidField(path.empty() ? "config" : path,
                        absl::StrCat("expected a map, got ",
                                     node.IsSequence() ? "a list" : Shorten(node.Scalar())));
  }
  const Descriptor& descriptor = *message->GetDescriptor();
  std::set<std::string> seen;
  for (const auto& entry : node) {
    if (!entry.first.IsScalar()) {
      return InvalidField(path.empty() ? "config" : path, "a key must be a name");
    }
    const std::string key = entry.first.Scalar();
    const std::string field_path = Join(path, Shorten(key));
    const FieldDescriptor* field = descriptor.FindFieldByName(key);
    if (field == nullptr) {
      return InvalidField(field_path,
                          absl::StrCat("unknown key", Suggest(key, FieldNames(descriptor))));
    }
    if (!seen.insert(key).second) return InvalidField(field_path, "duplicate key");
    TANDEM_RETURN_IF_ERROR(MergeField(entry.second, field_path, depth, field, message));
  }
  return absl::OkStatus();
}

// yaml-cpp recurses while it parses; a deep document must not overflow the stack. Counts the
// deepest possible nesting by flow brackets and by indentation.
bool TooDeep(absl::string_view yaml) {
  int flow = 0;
  for (const absl::string_view line : absl::StrSplit(yaml, '\n')) {
    int block = 0;
    bool at_start = true;
    for (const char c : line) {
      if (at_start && (c == ' ' || c == '-' || c == '?')) {
        if (++block > 64 * kMaxDepth) return true;
      } else {
        at_start = false;
      }
      if (c == '[' || c == '{') ++flow;
      if ((c == ']' || c == '}') && flow > 0) --flow;
      if (flow > 2 * kMaxDepth) return true;
    }
  }
  return false;
}

absl::StatusOr<YAML::Node> Parse(absl::string_view yaml) {
  if (TooDeep(yaml)) return absl::InvalidArgumentError("YAML: nested too deeply");
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(std::string(yaml));
    if (documents.size() > 1) {
      return absl::InvalidArgumentError("YAML: more than one document");
    }
    return documents.empty() ? YAML::Node() : documents[0];
  } catch (const YAML::Exception& error) {
    if (error.mark.is_null()) return absl::InvalidArgumentError(absl::StrCat("YAML: ", error.msg));
    return absl::InvalidArgumentError(absl::StrCat("YAML: line ", error.mark.line + 1, ", column ",
                                                   error.mark.column + 1, ": ", error.msg));
  }
}

Json ScalarToJson(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection* r = message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return repeated ? r->GetRepeatedBool(message, field, index) : r->GetBool(message, field);
    case FieldDescriptor::CPPTYPE_INT32:
      return repeated ? r->GetRepeatedInt32(message, field, index) : r->GetInt32(message, field);
    case FieldDescriptor::CPPTYPE_INT64:
      return repeated ? r->GetRepeatedInt64(message, field, index) : r->GetInt64(message, field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return repeated ? r->GetRepeatedUInt32(message, field, index) : r->GetUInt32(message, field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return repeated ? r->GetRepeatedUInt64(message, field, index) : r->GetUInt64(message, field);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return repeated ? r->GetRepeatedFloat(message, field, index) : r->GetFloat(message, field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return repeated ? r->GetRepeatedDouble(message, field, index) : r->GetDouble(message, field);
    case FieldDescriptor::CPPTYPE_STRING:
      return repeated ? r->GetRepeatedString(message, field, index) : r->GetString(message, field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumShortName(repeated ? *r->GetRepeatedEnum(message, field, index)
                                    : *r->GetEnum(message, field));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
  return nullptr;
}

Json MessageToJson(const Message& message) {
  Json json = Json::object();
  const Descriptor& descriptor = *message.GetDescriptor();
  const Reflection* reflection = message.GetReflection();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor* field = descriptor.field(i);
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (field->is_repeated()) {
      const int size = reflection->FieldSize(message, field);
      for (int k = 0; k < size; ++k) {
        json[field->name()].push_back(
            is_message ? MessageToJson(reflection->GetRepeatedMessage(message, field, k))
                       : ScalarToJson(message, field, k));
      }
      continue;
    }
    if (field->has_presence() && !reflection->HasField(message, field)) continue;
    if (is_message) {
      json[field->name()] = MessageToJson(reflection->GetMessage(message, field));
      continue;
    }
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM &&
        reflection->GetEnumValue(message, field) == 0) {
      continue;
    }
    json[field->name()] = ScalarToJson(message, field, 0);
  }
  return json;
}

std::string ScalarText(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  // YAML 1.1 readers take "1e-06" for text; a point makes it a number everywhere.
  if (value.is_number_float() && text.find('.') == std::string::npos) {
    if (const size_t e = text.find('e'); e != std::string::npos) text.insert(e, ".0");
  }
  return text;
}

void EmitYaml(const Json& json, int indent, std::string* out) {
  for (const auto& [key, value] : json.items()) {
    out->append(indent, ' ').append(key).append(":");
    if (value.is_object()) {
      if (value.empty()) {
        out->append(" {}\n");
      } else {
        out->append("\n");
        EmitYaml(value, indent + 2, out);
      }
    } else if (value.is_array()) {
      const std::string list = absl::StrJoin(value, ", ", [](std::string* text, const Json& item) {
        text->append(item.is_object() ? item.dump() : ScalarText(item));
      });
      absl::StrAppend(out, " [", list, "]\n");
    } else {
      absl::StrAppend(out, " ", ScalarText(value), "\n");
    }
  }
}

}  // namespace

std::string EnumShortName(const EnumValueDescriptor& value) {
  absl::string_view name = value.name();
  const std::string prefix = EnumPrefix(*value.type());
  if (absl::StartsWith(name, prefix)) name.remove_prefix(prefix.size());
  return absl::AsciiStrToLower(name);
}

absl::Status MergeYaml(absl::string_view yaml, Message* message) {
  TANDEM_ASSIGN_OR_RETURN(const YAML::Node root, Parse(yaml));
  try {
    return MergeMap(root, "", 0, message);
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("YAML: ", error.msg));
  }
}

absl::Status MergeYamlFile(const std::string& path, Message* message) {
  TANDEM_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxFileBytes));
  absl::Status status = MergeYaml(text, message);
  if (status.ok()) return status;
  absl::Status named(status.code(), absl::StrCat(path, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { named.SetPayload(url, payload); });
  return named;
}

absl::Status ApplyOverride(absl::string_view assignment, Message* message) {
  const size_t equals = assignment.find('=');
  if (equals == absl::string_view::npos || equals == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", assignment, "\": an override reads dotted.key=value"));
  }
  const std::string path(assignment.substr(0, equals));
  const std::vector<std::string> keys = absl::StrSplit(path, '.');
  std::string walked;
  for (size_t i = 0; i < keys.size(); ++i) {
    walked = Join(walked, keys[i]);
    const Descriptor& descriptor = *message->GetDescriptor();
    const FieldDescriptor* field = descriptor.FindFieldByName(keys[i]);
    if (field == nullptr) {
      return InvalidField(walked,
                          absl::StrCat("unknown key", Suggest(keys[i], FieldNames(descriptor))));
    }
    if (i + 1 == keys.size()) {
      absl::StatusOr<YAML::Node> value = Parse(assignment.substr(equals + 1));
      if (!value.ok()) return InvalidField(walked, value.status().message());
      try {
        return MergeField(*value, walked, 0, field, message);
      } catch (const YAML::Exception& error) {
        return InvalidField(walked, error.msg);
      }
    }
    if (field->is_repeated() || field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      return InvalidField(walked, absl::StrCat("has no key \"", keys[i + 1], "\""));
    }
    message = message->GetReflection()->MutableMessage(message, field);
  }
  return absl::OkStatus();
}

absl::Status Load(const std::string& path, const std::vector<std::string>& overrides,
                  Message* message) {
  if (!path.empty()) TANDEM_RETURN_IF_ERROR(MergeYamlFile(path, message));
  for (const std::string& assignment : overrides) {
    TANDEM_RETURN_IF_ERROR(ApplyOverride(assignment, message));
  }
  return absl::OkStatus();
}

std::string ToYaml(const Message& message) {
  std::string out;
  EmitYaml(MessageToJson(message), 0, &out);
  return out;
}

}  // namespace tandem::config
