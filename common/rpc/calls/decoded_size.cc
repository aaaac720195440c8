#include "common/rpc/calls/decoded_size.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include <string>
#include <unordered_map>

namespace tandem::rpc {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedInputStream;

constexpr int64_t kPointer = sizeof(void*);
constexpr int64_t kScalar = sizeof(google::protobuf::UnknownField);  // known ones take less
constexpr int kMaxDepth = 100;                                       // protobuf's own

// The low three bits of a tag.
enum WireType {
  kVarint = 0,
  kFixed64 = 1,
  kLength = 2,
  kGroupStart = 3,
  kGroupEnd = 4,
  kFixed32 = 5
};

int64_t ElementBytes(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return 1;
    case FieldDescriptor::CPPTYPE_INT64:
    case FieldDescriptor::CPPTYPE_UINT64:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return 8;
    default:
      return 4;
  }
}

// Bytes of an element on the wire, at least.
int64_t WireBytes(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED32:
    case FieldDescriptor::TYPE_FLOAT:
      return 4;
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_SFIXED64:
    case FieldDescriptor::TYPE_DOUBLE:
      return 8;
    default:
      return 1;
  }
}

class Counter {
 public:
  explicit Counter(CodedInputStream& in) : in_(in) {}

  int64_t bytes() const { return bytes_; }

  // False where counting ends. Groups, which proto3 does not have, are unknown fields with all that
  // they hold.
  bool CountFields(const Descriptor& type, int depth) {
    while (const uint32_t tag = in_.ReadTag()) {
      const FieldDescriptor* const field =
          groups_ > 0 ? nullptr : type.FindFieldByNumber(static_cast<int>(tag >> 3));
      if (!CountField(field, tag & 7, depth) || bytes_ > kMaxDecodedBytes) {
        return false;
      }
    }
    return true;
  }

  void CountMessage(const Descriptor& type) {
    int64_t& size = sizes_[&type];
    if (size == 0) {
      size = static_cast<int64_t>(google::protobuf::MessageFactory::generated_factory()
                                      ->GetPrototype(&type)
                                      ->SpaceUsedLong());
    }
    bytes_ += size;
  }

 private:
  bool CountField(const FieldDescriptor* field, uint32_t wire_type, int depth) {
    uint64_t number = 0;
    switch (wire_type) {
      case kVarint:
        bytes_ += kScalar;
        return in_.ReadVarint64(&number);
      case kFixed64:
        bytes_ += kScalar;
        return in_.Skip(8);
      case kFixed32:
        bytes_ += kScalar;
        return in_.Skip(4);
      case kLength:
        return CountLength(field, depth);
      case kGroupStart:
        ++groups_;
        bytes_ +=
            kScalar + kPointer + static_cast<int64_t>(sizeof(google::protobuf::UnknownFieldSet));
        return true;
      case kGroupEnd:
        return --groups_ >= 0;
      default:
        return false;
    }
  }

  bool CountLength(const FieldDescriptor* field, int depth) {
    uint32_t length = 0;
    if (!in_.ReadVarint32(&length)) return false;
    if (field != nullptr && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      bytes_ += kPointer;
      CountMessage(*field->message_type());
      if (depth == kMaxDepth) return false;
      const CodedInputStream::Limit limit = in_.PushLimit(static_cast<int>(length));
      const bool whole = CountFields(*field->message_type(), depth + 1);
      in_.PopLimit(limit);
      return whole;
    }
    if (field != nullptr && field->is_packable()) {
      bytes_ += length / WireBytes(*field) * ElementBytes(*field);
    } else {
      bytes_ += kScalar + kPointer + static_cast<int64_t>(sizeof(std::string)) + length;
    }
    return in_.Skip(static_cast<int>(length));
  }

  CodedInputStream& in_;
  int64_t bytes_ = 0;
  int groups_ = 0;  // that are open
  std::unordered_map<const Descriptor*, int64_t> sizes_;
};

}  // namespace

int64_t DecodedBytes(const Descriptor& type, google::protobuf::io::ZeroCopyInputStream& bytes) {
  CodedInputStream in(&bytes);
  Counter counter(in);
  counter.CountMessage(type);
  counter.CountFields(type, 0);
  return counter.bytes();
}

}  // namespace tandem::rpc
