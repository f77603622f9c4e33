// The stock ExecuTorch runtime behind a few C functions: a program, its methods, one call.
//
//     program   a memory-mapped file whose tables were verified; counts its users
//     loading   the backend packs a copy of the weights; the file's pages are given back as they are read
//     method    a loaded method of a program, with memory of its own
//     answers   0, or an error code of executorch/runtime/core/error.h, or kFault; the text is the engine's own
//
// Nothing is thrown across this border. Calls of one method must not overlap.

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

// The wheel has the library of the thread pool and not its header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
} // namespace executorch::extension::threadpool

namespace {

namespace et = executorch::runtime;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::BufferDataLoader;
using executorch::extension::MallocMemoryAllocator;

// The engine would have ended the process, or ran out of memory outside its own checks.
constexpr int kFault = -1;
constexpr size_t kLongestLog = 1 << 14;

std::mutex log_mutex;
std::string log_text;
int log_readers = 0;
pal_emit_log_message_method emit_before = nullptr;
pal_abort_method abort_before = nullptr;

// Calls of this thread that can take an exception.
thread_local int depth = 0;

struct Abort : std::exception {
  const char* what() const noexcept override {
    return "the engine met a fault after which it would end the process";
  }
};

void on_log(
    et_timestamp_t timestamp,
    et_pal_log_level_t level,
    const char* file,
    const char* function,
    size_t line,
    const char* message,
    size_t length) {
  std::unique_lock<std::mutex> lock(log_mutex);
  if (log_readers == 0) {
    const auto emit = emit_before;
    lock.unlock();
    if (emit != nullptr) {
      emit(timestamp, level, file, function, line, message, length);
    }
    return;
  }
  if (level != kError && level != kFatal) {
    return;
  }
  if (log_text.size() + length < kLongestLog) {
    log_text.append("[").append(file).append(":").append(std::to_string(line)).append("] ");
    log_text.append(message, length).append("\n");
  }
}

void on_abort() {
  // A thread of the pool has nobody above it who could take this.
  if (depth > 0) {
    throw Abort();
  }
  if (abort_before != nullptr) {
    abort_before();
  }
  std::abort();
}

// Stand before what the table has, without register_pal: that logs, and another user of the runtime in this
// process, such as its Python module, may have taken the table over since.
void take_over() {
  auto* table = const_cast<et::PalImpl*>(et::get_pal_impl());
  if (table->emit_log_message != on_log) {
    emit_before = table->emit_log_message;
    table->emit_log_message = on_log;
  }
  if (table->abort != on_abort) {
    abort_before = table->abort;
    table->abort = on_abort;
  }
}

// Collects the log of one call, and gives it to the caller's buffer if the call failed.
class Call {
 public:
  Call(char* text, size_t capacity) : text_(text), capacity_(capacity) {
    static const bool initialized = (et::runtime_init(), true);
    (void)initialized;
    ++depth;
    const std::lock_guard<std::mutex> lock(log_mutex);
    take_over();
    if (log_readers++ == 0) {
      log_text.clear();
    }
  }

  ~Call() {
    --depth;
    const std::lock_guard<std::mutex> lock(log_mutex);
    --log_readers;
  }

  template <typename Work>
  int run(Work work) {
    int code = kFault;
    const char* reason = "";
    try {
      code = static_cast<int>(work());
    } catch (const std::bad_alloc&) {
      code = static_cast<int>(et::Error::MemoryAllocationFailed);
    } catch (const Abort& abort) {
      reason = abort.what();
    } catch (...) {
      reason = "an exception left the engine";
    }
    if (code != 0 && capacity_ > 0) {
      const std::lock_guard<std::mutex> lock(log_mutex);
      std::snprintf(text_, capacity_, "%s%s%s", log_text.c_str(), reason, *reason ? "\n" : "");
    }
    return code;
  }

 private:
  char* text_;
  size_t capacity_;
};

// A file as read-only memory; a page that was given back is read from the file again when it is needed.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  ~Mapping() {
    if (start_ != nullptr) {
      munmap(start_, size_);
    }
  }

  et::Error open(const char* path) {
    const int descriptor = ::open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
      ET_LOG(Error, "%s: %s", path, strerror(errno));
      return et::Error::AccessFailed;
    }
    struct stat facts {};
    et::Error error = fstat(descriptor, &facts) == 0 ? et::Error::Ok : et::Error::AccessFailed;
    if (error == et::Error::Ok && facts.st_size > 0) { // nothing can't be mapped, and is no program
      size_ = static_cast<size_t>(facts.st_size);
      void* start = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
      if (start == MAP_FAILED) {
        error = errno == ENOMEM ? et::Error::MemoryAllocationFailed : et::Error::AccessFailed;
      }
      start_ = start == MAP_FAILED ? nullptr : start;
    }
    ::close(descriptor);
    return error;
  }

  void give_back() const {
    if (start_ != nullptr) {
      madvise(start_, size_, MADV_DONTNEED);
    }
  }

  const void* start() const {
    return start_;
  }

  size_t size() const {
    return size_;
  }

 private:
  void* start_ = nullptr;
  size_t size_ = 0;
};

// Gives the pages of a file back again and again while it lives. Without that, the file's weights and the ones
// that the backend packs from them are in memory together when a method is loaded.
class Returning {
 public:
  explicit Returning(const Mapping& mapping) : mapping_(mapping) {
    try {
      thread_ = std::thread([this] {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!wake_.wait_for(lock, std::chrono::milliseconds(5), [this] { return ended_; })) {
          mapping_.give_back();
        }
      });
    } catch (const std::system_error&) {
      // No thread to be had: loading only takes more memory.
    }
  }

  ~Returning() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) {
      thread_.join();
    }
    mapping_.give_back();
  }

 private:
  const Mapping& mapping_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool ended_ = false;
  std::thread thread_;
};

struct File {
  Mapping mapping;
  std::unique_ptr<BufferDataLoader> loader;
  std::unique_ptr<et::Program> program;

  ~File() {
    program.reset(); // its tables lie in the loader's pages
  }
};

struct ProgramHandle {
  std::shared_ptr<File> file;
};

struct Input {
  std::vector<TensorImpl::SizesType> sizes;
  std::vector<TensorImpl::DimOrderType> order;
  std::vector<TensorImpl::StridesType> strides;
  std::unique_ptr<TensorImpl> tensor;
};

struct Free {
  void operator()(uint8_t* memory) const {
    std::free(memory);
  }
};

struct MethodHandle {
  std::shared_ptr<File> file;
  std::vector<std::unique_ptr<uint8_t, Free>> memory;
  std::vector<et::Span<uint8_t>> spans;
  MallocMemoryAllocator allocator;
  MallocMemoryAllocator temporary;
  std::unique_ptr<et::HierarchicalAllocator> planned;
  std::unique_ptr<et::MemoryManager> manager;
  std::vector<Input> inputs;
  std::vector<size_t> output_bytes;
  std::vector<bool> output_planned;
  bool broken = false;
  std::unique_ptr<et::Method> method; // last: it is destroyed before what it uses
};

et::Error prepare_memory(MethodHandle& handle, const et::MethodMeta& meta) {
  for (size_t index = 0; index < meta.num_memory_planned_buffers(); ++index) {
    const auto bytes = meta.memory_planned_buffer_size(index);
    if (!bytes.ok()) {
      return bytes.error();
    }
    const size_t size = static_cast<size_t>(std::max<int64_t>(bytes.get(), 1));
    // calloc: pages that a call never touches stay out of memory.
    handle.memory.emplace_back(static_cast<uint8_t*>(std::calloc(size, 1)));
    if (handle.memory.back() == nullptr) {
      return et::Error::MemoryAllocationFailed;
    }
    handle.spans.emplace_back(handle.memory.back().get(), size);
  }
  handle.planned = std::make_unique<et::HierarchicalAllocator>(
      et::Span<et::Span<uint8_t>>(handle.spans.data(), handle.spans.size()));
  handle.manager = std::make_unique<et::MemoryManager>(
      &handle.allocator, handle.planned.get(), &handle.temporary);
  return et::Error::Ok;
}

et::Error prepare_tensors(MethodHandle& handle, const et::MethodMeta& meta) {
  for (size_t index = 0; index < meta.num_inputs(); ++index) {
    const auto info = meta.input_tensor_meta(index);
    if (!info.ok()) {
      return info.error();
    }
    const auto sizes = info->sizes();
    Input input;
    input.sizes.assign(sizes.begin(), sizes.end());
    input.strides.assign(sizes.size(), 1);
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      input.order.push_back(static_cast<TensorImpl::DimOrderType>(axis));
    }
    for (size_t axis = sizes.size(); axis-- > 1;) {
      input.strides[axis - 1] = input.strides[axis] * std::max(input.sizes[axis], 1);
    }
    input.tensor = std::make_unique<TensorImpl>(
        info->scalar_type(),
        static_cast<ssize_t>(input.sizes.size()),
        input.sizes.data(),
        nullptr,
        input.order.data(),
        input.strides.data());
    handle.inputs.push_back(std::move(input));
  }
  for (size_t index = 0; index < meta.num_outputs(); ++index) {
    const auto info = meta.output_tensor_meta(index);
    if (!info.ok()) {
      return info.error();
    }
    handle.output_bytes.push_back(info->nbytes());
    handle.output_planned.push_back(info->is_memory_planned());
  }
  return et::Error::Ok;
}

et::Error run(MethodHandle& handle, void* const* inputs, void* const* outputs) {
  et::Method& method = *handle.method;
  for (size_t index = 0; index < handle.inputs.size(); ++index) {
    TensorImpl* tensor = handle.inputs[index].tensor.get();
    tensor->set_data(inputs[index]);
    const et::Error error = method.set_input(et::EValue(Tensor(tensor)), index);
    if (error != et::Error::Ok) {
      return error;
    }
  }
  for (size_t index = 0; index < handle.output_bytes.size(); ++index) {
    if (!handle.output_planned[index]) {
      const et::Error error =
          method.set_output_data_ptr(outputs[index], handle.output_bytes[index], index);
      if (error != et::Error::Ok) {
        return error;
      }
    }
  }
  const et::Error error = method.execute();
  if (error != et::Error::Ok) {
    return error;
  }
  for (size_t index = 0; index < handle.output_bytes.size(); ++index) {
    const et::EValue& value = method.get_output(index);
    if (!value.isTensor() || value.toTensor().nbytes() != handle.output_bytes[index]) {
      return et::Error::InvalidState;
    }
    const void* found = value.toTensor().const_data_ptr();
    if (found != outputs[index]) {
      std::memcpy(outputs[index], found, handle.output_bytes[index]);
    }
  }
  return et::Error::Ok;
}

} // namespace

#pragma GCC visibility push(default)
extern "C" {

// Threads of the process's pool; a count above 0 first gives it another size, before any method is loaded.
int prge_threads(int count, int* found, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    auto* pool = executorch::extension::threadpool::get_threadpool();
    if (pool == nullptr) {
      return et::Error::InvalidState;
    }
    if (count > 0) {
      pool->_unsafe_reset_threadpool(static_cast<uint32_t>(count));
    }
    *found = static_cast<int>(pool->get_thread_count());
    return et::Error::Ok;
  });
}

// Map a file and verify its tables.
int prge_open(const char* path, void** program, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    auto file = std::make_shared<File>();
    const et::Error error = file->mapping.open(path);
    if (error != et::Error::Ok) {
      return error;
    }
    file->loader = std::make_unique<BufferDataLoader>(file->mapping.start(), file->mapping.size());
    auto loaded = et::Program::load(file->loader.get(), et::Program::Verification::InternalConsistency);
    if (!loaded.ok()) {
      return loaded.error();
    }
    file->program = std::make_unique<et::Program>(std::move(loaded.get()));
    *program = new ProgramHandle{std::move(file)};
    return et::Error::Ok;
  });
}

// Methods that are loaded keep the file.
void prge_close(void* program) {
  delete static_cast<ProgramHandle*>(program);
}

// How many methods, and the name of one; null where there is none.
size_t prge_methods(void* program) {
  return static_cast<ProgramHandle*>(program)->file->program->num_methods();
}

const char* prge_method_name(void* program, size_t index) {
  const auto name = static_cast<ProgramHandle*>(program)->file->program->get_method_name(index);
  return name.ok() ? name.get() : nullptr;
}

// Inputs or outputs of a method.
int prge_count(void* program, const char* method, int outputs, size_t* count, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    const auto meta = static_cast<ProgramHandle*>(program)->file->program->method_meta(method);
    if (meta.ok()) {
      *count = outputs ? meta->num_outputs() : meta->num_inputs();
    }
    return meta.error();
  });
}

// Type, rank and sizes of one of them; as many sizes as fit into `most`.
int prge_tensor(
    void* program,
    const char* method,
    int outputs,
    size_t index,
    int* dtype,
    size_t* rank,
    int64_t* sizes,
    size_t most,
    char* text,
    size_t capacity) {
  return Call(text, capacity).run([&] {
    const auto meta = static_cast<ProgramHandle*>(program)->file->program->method_meta(method);
    if (!meta.ok()) {
      return meta.error();
    }
    const auto info = outputs ? meta->output_tensor_meta(index) : meta->input_tensor_meta(index);
    if (!info.ok()) {
      return info.error();
    }
    *dtype = static_cast<int>(info->scalar_type());
    *rank = info->sizes().size();
    std::copy_n(info->sizes().begin(), std::min(*rank, most), sizes);
    return et::Error::Ok;
  });
}

// Load a method. With `share_weights`, methods whose weights have the same content hold them once.
int prge_load(
    void* program, const char* name, int share_weights, void** method, char* text, size_t capacity) {
  auto handle = std::unique_ptr<MethodHandle>();
  const int code = Call(text, capacity).run([&] {
    handle = std::make_unique<MethodHandle>();
    handle->file = static_cast<ProgramHandle*>(program)->file;
    const auto meta = handle->file->program->method_meta(name);
    if (!meta.ok()) {
      return meta.error();
    }
    et::Error error = prepare_memory(*handle, meta.get());
    if (error == et::Error::Ok) {
      error = prepare_tensors(*handle, meta.get());
    }
    if (error != et::Error::Ok) {
      return error;
    }
    et::BackendOptions<1> options;
    et::LoadBackendOptionsMap map;
    error = options.set_option("weight_cache_enabled", share_weights != 0);
    if (error == et::Error::Ok) {
      error = map.set_options("XnnpackBackend", options.view());
    }
    if (error != et::Error::Ok) {
      return error;
    }
    const Returning returning(handle->file->mapping);
    auto loaded = handle->file->program->load_method(name, handle->manager.get(), nullptr, nullptr, &map);
    if (!loaded.ok()) {
      return loaded.error();
    }
    handle->method = std::make_unique<et::Method>(std::move(loaded.get()));
    return et::Error::Ok;
  });
  if (code == 0) {
    *method = handle.release();
  } else if (code == kFault) {
    handle.release(); // in the state that the fault left it in, taking it apart is not safe
  }
  return code;
}

// Bytes of the memory that the program planned for this method's values outside the backend.
size_t prge_planned_bytes(void* method) {
  size_t bytes = 0;
  for (const auto& span : static_cast<MethodHandle*>(method)->spans) {
    bytes += span.size();
  }
  return bytes;
}

// Run a method once: contiguous arrays of its types and shapes, in its order.
int prge_run(void* method, void* const* inputs, void* const* outputs, char* text, size_t capacity) {
  auto* handle = static_cast<MethodHandle*>(method);
  const int code = Call(text, capacity).run([&] {
    return handle->broken ? et::Error::InvalidState : run(*handle, inputs, outputs);
  });
  handle->broken = handle->broken || code == kFault;
  return code;
}

void prge_unload(void* method) {
  auto* handle = static_cast<MethodHandle*>(method);
  if (!handle->broken) {
    delete handle;
  }
}

} // extern "C"
#pragma GCC visibility pop
