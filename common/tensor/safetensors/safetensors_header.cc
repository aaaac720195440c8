#include "common/tensor/safetensors/safetensors_header.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

using nlohmann::json;

// Accepts exactly {name: {"dtype": text, "shape": [n...], "data_offsets": [a, b]}, ...,
// "__metadata__": {text: text}} and stops at the first other token.
class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  SafetensorsHeader header;
  std::string error;

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is not an integer");
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) return Unexpected("a number");
    if (field_ == "shape") {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Fail("shape overflows");
      }
      if (entry().shape.size() == kMaxDimensions) return Fail("more than 64 dimensions");
      entry().shape.push_back(static_cast<int64_t>(value));
    } else {
      if (offsets_ == 2) return Fail("data_offsets must hold two numbers");
      (offsets_++ == 0 ? entry().begin : entry().end) = value;
    }
    return true;
  }

  bool string(string_t& value) override {
    if (in_metadata_) {
      header.metadata[field_] = value;
      return true;
    }
    if (depth_ != 2 || in_array_ || field_ != "dtype") return Unexpected("text");
    const auto dtype = ParseDType(value);
    if (!dtype.has_value()) return Fail(absl::StrCat("unknown dtype '", value.substr(0, 32), "'"));
    entry().dtype = *dtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (depth_ == 2 || in_array_) return Unexpected("an object");
    if (++depth_ == 2) {
      fields_.clear();
      offsets_ = 0;
      in_metadata_ = name_ == "__metadata__";
      if (!in_metadata_) {
        header.entries.emplace_back();
        entry().name = name_;
      }
    }
    return true;
  }

  bool key(string_t& value) override {
    if (depth_ == 1) {
      name_ = value;
      if (!names_.insert(value).second) return Fail("appears twice");
      return true;
    }
    field_ = value;
    if (!fields_.insert(value).second) return Fail(absl::StrCat("key '", value, "' appears twice"));
    if (!in_metadata_ && value != "dtype" && value != "shape" && value != "data_offsets") {
      return Fail(absl::StrCat("unknown key '", value.substr(0, 64), "'"));
    }
    return true;
  }

  bool end_object() override {
    if (depth_-- == 2 && !in_metadata_) {
      if (fields_.size() != 3) return Fail("needs dtype, shape and data_offsets");
      if (offsets_ != 2) return Fail("data_offsets must hold two numbers");
    }
    in_metadata_ = false;
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_array_ || in_metadata_ || field_ == "dtype") {
      return Unexpected("an array");
    }
    return in_array_ = true;
  }

  bool end_array() override {
    in_array_ = false;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    if (error.empty()) error = absl::StrCat("header is not valid JSON at byte ", position);
    return false;
  }

 private:
  static constexpr size_t kMaxDimensions = 64;

  SafetensorsEntry& entry() { return header.entries.back(); }

  bool Fail(absl::string_view what) {
    error = absl::StrCat("tensor '", name_, "': ", what);
    return false;
  }
  bool Unexpected(absl::string_view what) {
    if (depth_ < 2) {
      error = absl::StrCat("header holds ", what, name_.empty() ? "" : " at '", name_,
                           name_.empty() ? "" : "'", " where an object is expected");
      return false;
    }
    return Fail(absl::StrCat(what, " at '", field_, "'"));
  }

  int depth_ = 0;
  bool in_array_ = false;
  bool in_metadata_ = false;
  int offsets_ = 0;
  std::string name_, field_;
  std::set<std::string> names_, fields_;
};

absl::Status CheckSize(const SafetensorsEntry& entry, absl::string_view where) {
  if (entry.end < entry.begin) {
    return absl::InvalidArgumentError(absl::StrCat(where, "data_offsets run backwards"));
  }
  uint64_t bytes = ItemSizeBytes(entry.dtype);
  for (const int64_t size : entry.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes)) {
      return absl::InvalidArgumentError(absl::StrCat(where, "shape overflows"));
    }
  }
  if (bytes != entry.end - entry.begin) {
    return absl::InvalidArgumentError(absl::StrCat(where, "shape and dtype need ", bytes,
                                                   " bytes, data_offsets give ",
                                                   entry.end - entry.begin));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view text,
                                                         absl::string_view path) {
  HeaderHandler handler;
  if (!json::sax_parse(text.data(), text.data() + text.size(), &handler)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", handler.error));
  }
  SafetensorsHeader header = std::move(handler.header);
  std::sort(header.entries.begin(), header.entries.end(),
            [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
              return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
            });
  uint64_t expected = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    const std::string where = absl::StrCat(path, ": tensor '", entry.name, "': ");
    if (absl::Status status = CheckSize(entry, where); !status.ok()) return status;
    if (entry.begin != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          where, "data starts at byte ", entry.begin,
          entry.begin < expected ? ", inside the tensor before it (which ends at "
                                 : ", with a hole after the tensor before it (which ends at ",
          expected, ")"));
    }
    expected = entry.end;
  }
  return header;
}

}  // namespace tandem
