// Buffers and lists of Python, shared by the parts of the module.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "digest_chain.h"

namespace kvcache {

// A contiguous view of an object's memory, which the object cannot free or resize while the view exists.
class Buffer {
  public:
    Buffer(const pybind11::handle& object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | flags) != 0) {
            throw pybind11::error_already_set();
        }
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
    std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }
    std::size_t item_bytes() const { return static_cast<std::size_t>(view_.itemsize); }

    // Whether it has integers of this size. `codes`: the accepted format letters.
    bool holds(const char* codes, std::size_t size) const {
        const char* format = this->format();
        if (*format == '@' || *format == '=' || *format == '<') ++format;
        return std::strlen(format) == 1 && std::strchr(codes, *format) && item_bytes() == size;
    }

    // The number of these integers; TypeError for other contents.
    std::size_t integers(const char* codes, std::size_t size, const char* expected) const {
        if (!holds(codes, size)) {
            throw pybind11::type_error("a buffer of format '" + std::string(format()) + "': expected " + expected);
        }
        return bytes() / size;
    }

  private:
    const char* format() const { return view_.format ? view_.format : "B"; }

    Py_buffer view_;
};

inline void expect(bool held, const std::string& message) {
    if (!held) throw pybind11::value_error(message);
}

// Concatenates parts. Releases the interpreter lock while it copies and frees.
template <class Item>
pybind11::bytes joined(std::vector<std::vector<Item>> parts) {
    std::size_t items = 0;
    for (const auto& part : parts) items += part.size();
    pybind11::bytes out(nullptr, items * sizeof(Item));
    std::uint8_t* to = reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(out.ptr()));
    {
        pybind11::gil_scoped_release unlocked;
        for (const auto& part : parts) {
            to = std::copy_n(reinterpret_cast<const std::uint8_t*>(part.data()), part.size() * sizeof(Item), to);
        }
        parts = {};
    }
    return out;
}

// Checked inputs of a digest chain. It keeps views of the caller's objects.
class ChainArgs {
  public:
    ChainArgs(const pybind11::handle& parent, const pybind11::handle& tokens, std::size_t block_tokens,
              const pybind11::handle& extras);

    std::size_t blocks() const { return blocks_; }

    // Needs no interpreter lock. OverflowError for an id of more than 32 bits.
    void digest(bool plain, std::uint8_t* out) const;

  private:
    Buffer parent_, tokens_;
    std::size_t block_tokens_, blocks_;
    std::deque<Buffer> held_;
    std::vector<Bytes> extras_;
    bool has_extras_;
};

// Checks requests `first` to `end` of a trace: `starts` in `blocks`, block numbers below `unique`. ValueError.
void check_requests(const Buffer& starts, const Buffer& blocks, std::size_t unique, std::size_t first, std::size_t end);

void bind_chain(pybind11::module_& module);
void bind_index(pybind11::module_& module);
void bind_replay(pybind11::module_& module);

}  // namespace kvcache
