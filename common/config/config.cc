#include "common/config/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/atomic_file.h"
#include "common/config/flat_names.h"
#include "common/config/renamed_names.h"

namespace tandem::config {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

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
  return text.size() <= 60 ? text : absl::StrCat(text.substr(0, 57), "...");
}

// Whether text is well-formed UTF-8 (RFC 3629), as a message's text must be.
bool IsUtf8(absl::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<uint8_t>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if ((lead >= 0x80 && lead < 0xC2) || lead > 0xF4 || length > text.size() - i) return false;
    uint32_t code = length == 1 ? lead : lead & (0x7F >> length);
    for (size_t j = 1; j < length; ++j) {
      const auto byte = static_cast<uint8_t>(text[i + j]);
      if ((byte & 0xC0) != 0x80) return false;
      code = code << 6 | (byte & 0x3F);
    }
    const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
    if (overlong || (code >= 0xD800 && code < 0xE000) || code > 0x10FFFF) return false;
    i += length;
  }
  return true;
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
        if (!IsUtf8(text)) return InvalidField(path, "is not UTF-8");
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

// The path of a flat name's setting, "senior.dtype".
std::string NestedPath(const FlatName& name) { return absl::StrCat(name.section, ".", name.field); }

// Returns the flat name `key` of a message that has the section of its setting and no field of that
// name; nullptr if there is none.
const FlatName* FindFlatName(const std::string& key, const Descriptor& type) {
  if (type.FindFieldByName(key) != nullptr) return nullptr;
  const auto* const found =
      std::find_if(std::begin(kFlatNames), std::end(kFlatNames), [&](const FlatName& name) {
        return name.flat == key && type.FindFieldByName(std::string(name.section)) != nullptr;
      });
  return found == std::end(kFlatNames) ? nullptr : found;
}

// A field and the message that holds it.
struct Setting {
  Message* holder;
  const FieldDescriptor* field;  // nullptr: the key is unknown
};

// The field of a message that has the name `key`, or the flat name.
Setting FindSetting(const std::string& key, Message* message) {
  const Descriptor& type = *message->GetDescriptor();
  const FlatName* const flat = FindFlatName(key, type);
  if (flat == nullptr) return {message, type.FindFieldByName(key)};
  Message* const section = message->GetReflection()->MutableMessage(
      message, type.FindFieldByName(std::string(flat->section)));
  return {section, section->GetDescriptor()->FindFieldByName(std::string(flat->field))};
}

// Whether a map has a value for a field of a map in it.
bool HasNested(const YAML::Node& map, const FlatName& name) {
  const YAML::Node section = map[std::string(name.section)];
  if (!section.IsDefined() || !section.IsMap()) return false;
  const YAML::Node value = section[std::string(name.field)];
  return value.IsDefined() && !value.IsNull();
}

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
  std::map<std::string, int> seen;  // the line of each
  for (const auto& entry : node) {
    if (!entry.first.IsScalar()) {
      return InvalidField(path.empty() ? "config" : path, "a key must be a name");
    }
    const std::string key = entry.first.Scalar();
    const std::string field_path = Join(path, Shorten(key));
    const FlatName* const flat = FindFlatName(key, descriptor);
    if (flat == nullptr && descriptor.FindFieldByName(key) == nullptr) {
      return InvalidField(field_path, absl::StrCat("unknown key", SuggestField(key, descriptor)));
    }
    const int line = entry.first.Mark().line + 1;
    if (const auto [first, is_new] = seen.emplace(key, line); !is_new) {
      return InvalidField(field_path,
                          absl::StrCat("duplicate key, in lines ", first->second, " and ", line));
    }
    if (entry.second.IsNull()) continue;
    if (flat != nullptr && HasNested(node, *flat)) {
      return InvalidField(field_path,
                          absl::StrCat("is also given as ", Join(path, NestedPath(*flat))));
    }
    const Setting setting = FindSetting(key, message);
    TANDEM_RETURN_IF_ERROR(
        MergeField(entry.second, field_path, depth, setting.field, setting.holder));
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

// The shortest text that reads back as `value`; with a point, since YAML 1.1 readers take "1e-06"
// for text.
template <typename T>
std::string NumberText(T value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  std::string text(buffer, end);
  if (text.find('.') == std::string::npos) {
    const size_t e = text.find('e');
    text.insert(e == std::string::npos ? text.size() : e, ".0");
  }
  return text;
}

void EmitScalar(const Message& message, const FieldDescriptor* field, int index,
                YAML::Emitter& out) {
  const Reflection* r = message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      out << (repeated ? r->GetRepeatedBool(message, field, index) : r->GetBool(message, field));
      break;
    case FieldDescriptor::CPPTYPE_INT32:
      out << (repeated ? r->GetRepeatedInt32(message, field, index) : r->GetInt32(message, field));
      break;
    case FieldDescriptor::CPPTYPE_INT64:
      out << (repeated ? r->GetRepeatedInt64(message, field, index) : r->GetInt64(message, field));
      break;
    case FieldDescriptor::CPPTYPE_UINT32:
      out << (repeated ? r->GetRepeatedUInt32(message, field, index)
                       : r->GetUInt32(message, field));
      break;
    case FieldDescriptor::CPPTYPE_UINT64:
      out << (repeated ? r->GetRepeatedUInt64(message, field, index)
                       : r->GetUInt64(message, field));
      break;
    case FieldDescriptor::CPPTYPE_FLOAT:
      out << NumberText(repeated ? r->GetRepeatedFloat(message, field, index)
                                 : r->GetFloat(message, field));
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      out << NumberText(repeated ? r->GetRepeatedDouble(message, field, index)
                                 : r->GetDouble(message, field));
      break;
    case FieldDescriptor::CPPTYPE_STRING:
      // In quotes: other readers would take some texts for numbers or null.
      out << YAML::DoubleQuoted
          << (repeated ? r->GetRepeatedString(message, field, index)
                       : r->GetString(message, field));
      break;
    case FieldDescriptor::CPPTYPE_ENUM:
      out << EnumShortName(repeated ? *r->GetRepeatedEnum(message, field, index)
                                    : *r->GetEnum(message, field));
      break;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
}

void EmitMessage(const Message& message, YAML::Emitter& out);

void EmitList(const Message& message, const FieldDescriptor* field, YAML::Emitter& out) {
  const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
  const Reflection* reflection = message.GetReflection();
  out << YAML::Flow << YAML::BeginSeq;
  for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
    if (is_message) {
      EmitMessage(reflection->GetRepeatedMessage(message, field, i), out);
    } else {
      EmitScalar(message, field, i, out);
    }
  }
  out << YAML::EndSeq;
}

// Whether ToYaml leaves the field out.
bool IsUnset(const Message& message, const FieldDescriptor* field) {
  const Reflection* reflection = message.GetReflection();
  if (field->is_repeated()) return reflection->FieldSize(message, field) == 0;
  if (field->has_presence()) return !reflection->HasField(message, field);
  return field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM &&
         reflection->GetEnumValue(message, field) == 0;
}

void EmitMessage(const Message& message, YAML::Emitter& out) {
  const Descriptor& descriptor = *message.GetDescriptor();
  out << YAML::BeginMap;
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor* field = descriptor.field(i);
    if (IsUnset(message, field)) continue;
    out << YAML::Key << field->name() << YAML::Value;
    if (field->is_repeated()) {
      EmitList(message, field, out);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      EmitMessage(message.GetReflection()->GetMessage(message, field), out);
    } else {
      EmitScalar(message, field, 0, out);
    }
  }
  out << YAML::EndMap;
}

// Puts the file or variable that an error comes from before its message.
absl::Status NameSource(absl::string_view source, const absl::Status& status) {
  if (status.ok()) return status;
  absl::Status named(status.code(), absl::StrCat(source, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { named.SetPayload(url, payload); });
  return named;
}

// "TANDEM__SENIOR__DTYPE=" for senior.dtype.
std::string VariableOf(absl::string_view path) {
  return absl::StrCat(kVariablePrefix,
                      absl::AsciiStrToUpper(absl::StrReplaceAll(path, {{".", "__"}})), "=");
}

bool AnyStartsWith(const std::vector<std::string>& texts, const std::string& start) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return text.starts_with(start); });
}

// Whether a source sets a field by its flat name.
bool Uses(const Sources& sources, absl::string_view flat) {
  if (AnyStartsWith(sources.overrides, absl::StrCat(flat, "=")) ||
      AnyStartsWith(sources.variables, VariableOf(flat))) {
    return true;
  }
  const auto text = ReadFile(sources.file, kMaxFileBytes);
  if (!text.ok()) return false;
  const auto root = Parse(*text);
  return root.ok() && root->IsMap() && (*root)[std::string(flat)].IsDefined();
}

}  // namespace

std::string SuggestField(absl::string_view key, const Descriptor& type) {
  if (const auto new_name = NewName(key)) return absl::StrCat("; ", key, " is now ", *new_name);
  std::vector<std::string> names;
  for (int i = 0; i < type.field_count(); ++i) names.push_back(type.field(i)->name());
  for (const FlatName& name : kFlatNames) {
    const std::string flat(name.flat);
    if (FindFlatName(flat, type) != nullptr) names.push_back(flat);
  }
  return Suggest(key, names);
}

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
  return NameSource(path, MergeYaml(text, message));
}

absl::Status ApplyOverride(absl::string_view assignment, Message* message) {
  const size_t equals = assignment.find('=');
  if (equals == absl::string_view::npos || equals == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", assignment, "\": an override has the form dotted.key=value"));
  }
  const std::string path(assignment.substr(0, equals));
  const std::vector<std::string> keys = absl::StrSplit(path, '.');
  std::string walked;
  for (size_t i = 0; i < keys.size(); ++i) {
    walked = Join(walked, keys[i]);
    const Descriptor& descriptor = *message->GetDescriptor();
    const auto [holder, field] = FindSetting(keys[i], message);
    if (field == nullptr) {
      // An old name may stand in sections that are unknown, too.
      const std::string& key = NewName(keys.back()).has_value() ? keys.back() : keys[i];
      return InvalidField(walked, absl::StrCat("unknown key", SuggestField(key, descriptor)));
    }
    if (i + 1 == keys.size()) {
      const absl::string_view text = assignment.substr(equals + 1);
      absl::StatusOr<YAML::Node> value = Parse(text);
      // No text is a list or a map: "::" and "[::1]" are addresses, whatever YAML makes of them.
      const bool is_text =
          !field->is_repeated() && field->cpp_type() == FieldDescriptor::CPPTYPE_STRING;
      if (is_text && (!value.ok() || value->IsSequence() || value->IsMap())) {
        value = YAML::Node(std::string(text));
      }
      if (!value.ok()) return InvalidField(walked, value.status().message());
      try {
        return MergeField(*value, walked, 0, field, holder);
      } catch (const YAML::Exception& error) {
        return InvalidField(walked, error.msg);
      }
    }
    if (field->is_repeated() || field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      return InvalidField(walked, absl::StrCat("has no key \"", keys[i + 1], "\""));
    }
    message = holder->GetReflection()->MutableMessage(holder, field);
  }
  return absl::OkStatus();
}

absl::Status ApplyVariable(absl::string_view assignment, Message* message) {
  const std::pair<absl::string_view, absl::string_view> variable =
      absl::StrSplit(assignment, absl::MaxSplits('=', 1));
  absl::string_view key = variable.first;
  if (!absl::ConsumePrefix(&key, kVariablePrefix)) return absl::OkStatus();
  const std::string path = absl::StrReplaceAll(absl::AsciiStrToLower(key), {{"__", "."}});
  return NameSource(variable.first,
                    ApplyOverride(absl::StrCat(path, "=", variable.second), message));
}

absl::Status Load(const Sources& sources, Message* message) {
  if (!sources.file.empty()) TANDEM_RETURN_IF_ERROR(MergeYamlFile(sources.file, message));
  // Variables have no order in which one of two could win.
  for (const FlatName& name : kFlatNames) {
    const std::string flat = VariableOf(name.flat);
    const std::string nested = VariableOf(NestedPath(name));
    if (AnyStartsWith(sources.variables, flat) && AnyStartsWith(sources.variables, nested)) {
      return InvalidField(name.flat, absl::StrCat("is also given as ", NestedPath(name), ": both ",
                                                  flat, "… and ", nested, "… are set"));
    }
  }
  for (const std::string& assignment : sources.variables) {
    TANDEM_RETURN_IF_ERROR(ApplyVariable(assignment, message));
  }
  for (const std::string& assignment : sources.overrides) {
    TANDEM_RETURN_IF_ERROR(ApplyOverride(assignment, message));
  }
  return absl::OkStatus();
}

absl::Status NameAsWritten(const Sources& sources, const absl::Status& status) {
  const std::string path = FieldPath(status).value_or("");
  for (const FlatName& name : kFlatNames) {
    absl::string_view rest = path;  // "[0]", ".config.json"
    if (!absl::ConsumePrefix(&rest, NestedPath(name))) continue;
    if (!rest.empty() && rest[0] != '[' && rest[0] != '.') continue;
    if (!Uses(sources, name.flat)) return status;
    return WithFieldPath(absl::StrCat(name.flat, rest), status);
  }
  return status;
}

std::string ToYaml(const Message& message) {
  YAML::Emitter out;
  EmitMessage(message, out);
  return absl::StrCat(out.c_str(), "\n");
}

}  // namespace tandem::config
