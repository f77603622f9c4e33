// The stock ExecuTorch runtime through a few C functions: programs, weights files, arenas, methods, one call.
//
//     program   a memory-mapped and verified file; counts its users
//     weights   a memory-mapped file of constants for a program that has none, and the file of their packed form
//     arena     planned memory of methods that never run at once
//     loading   the backend packs a copy of the weights; the files' pages are released as they are read
//     method    a loaded method of a program; it keeps program, weights and arena alive
//     results   0, or an error code of executorch/runtime/core/error.h, or kFault; the text is the engine's log
//
// No exception crosses this interface. Calls of one method, or of methods of one arena, must not overlap.

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/flat_tensor/flat_tensor_data_map.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/core/function_ref.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/sysmacros.h>
#endif
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
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

// The wheel has the thread pool's library, but not its header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  void run(executorch::runtime::FunctionRef<void(size_t)> work, size_t range);
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
} // namespace executorch::extension::threadpool

namespace {

namespace et = executorch::runtime;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::BufferDataLoader;
using executorch::extension::FlatTensorDataMap;
using executorch::extension::MallocMemoryAllocator;

// The engine would have aborted, or it ran out of memory outside of its own checks.
constexpr int kFault = -1;
constexpr size_t kLongestLog = 1 << 14;
constexpr size_t kAlignment = 64;
constexpr int kOneWorkspaceForAll = 2; // XNNPACK's scratch memory: shared by all methods with this option

std::mutex log_mutex;
std::string log_text;
int log_readers = 0;
pal_emit_log_message_method emit_before = nullptr;
pal_abort_method abort_before = nullptr;

// Number of calls of this thread that can catch an exception.
thread_local int depth = 0;

// Whether this thread loads weights from a packed file, which the backend must not lock; see Weights.
thread_local bool shares_packed_file = false;

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
  if (shares_packed_file && std::string_view(message, length).substr(0, 6) == "flock(") {
    return;
  }
  if (log_text.size() + length < kLongestLog) {
    log_text.append("[").append(file).append(":").append(std::to_string(line)).append("] ");
    log_text.append(message, length).append("\n");
  }
}

void on_abort() {
  // A thread of the pool has no caller that could catch the exception.
  if (depth > 0) {
    throw Abort();
  }
  if (abort_before != nullptr) {
    abort_before();
  }
  std::abort();
}

// Replaces the table's functions and calls them, without register_pal: that logs, and another user of the
// runtime in this process, such as its Python module, may have replaced the table since.
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

bool logged() {
  const std::lock_guard<std::mutex> lock(log_mutex);
  return !log_text.empty();
}

// Collects the log of one call, and writes it to the caller's buffer if the call failed.
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

// A file as read-only memory; a released page is read from the file again on its next use.
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
    if (error == et::Error::Ok && facts.st_size > 0) { // an empty file can't be mapped and is no program
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

// Releases the pages of files repeatedly during its lifetime. Otherwise the files' weights and the weights that
// the backend packs from them would be in memory together when a method is loaded.
class Returning {
 public:
  explicit Returning(std::vector<const Mapping*> mappings) : mappings_(std::move(mappings)) {
    try {
      thread_ = std::thread([this] {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!wake_.wait_for(lock, std::chrono::milliseconds(5), [this] { return ended_; })) {
          give_back();
        }
      });
    } catch (const std::system_error&) {
      // Without a thread, loading only takes more memory.
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
    give_back();
  }

 private:
  void give_back() const {
    for (const Mapping* mapping : mappings_) {
      mapping->give_back();
    }
  }

  const std::vector<const Mapping*> mappings_;
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
    program.reset(); // its tables are in the loader's pages
  }
};

// Number of loads and unloads so far; after one, other memory may be where a packed file was mapped.
std::mutex mappings_mutex;
size_t mappings = 1;

// Constants by the names that a program uses for them.
//
// Each weights file has its own packed file: the backend identifies weights by name, and blocks share names.
// Only the object that was opened for packing writes the packed file; all others map it. Our shared lock keeps
// the backend from taking an exclusive lock, which would deny the packed file to a second process.
struct Weights {
  Mapping mapping;
  std::unique_ptr<BufferDataLoader> loader;
  std::unique_ptr<FlatTensorDataMap> map;
  std::string packed;
  bool packing = false;
  int lock = -1;
  std::vector<et::Span<uint8_t>> mapped; // mappings of the packed file as of `mapped_at`
  size_t mapped_at = 0;

  // Releases the pages that methods have mapped, which are read again on their next use. Returns false if the
  // system doesn't list the mappings.
  bool give_back() {
    struct stat facts {};
    if (lock < 0 || fstat(lock, &facts) != 0) {
      return false;
    }
    const std::lock_guard<std::mutex> guard(mappings_mutex);
    if (mapped_at != mappings) {
      mapped.clear();
      find_mapped(facts);
      mapped_at = mappings;
    }
    for (const auto& part : mapped) {
      madvise(part.data(), part.size(), MADV_DONTNEED);
    }
    mapping.give_back();
    return !mapped.empty() || facts.st_size == 0;
  }

  void find_mapped(const struct stat& facts) {
#ifdef __linux__
    std::unique_ptr<FILE, int (*)(FILE*)> maps(std::fopen("/proc/self/maps", "re"), std::fclose);
    if (maps == nullptr) {
      return;
    }
    char line[512]; // a path may be longer: its rest is not a line of its own
    while (std::fgets(line, sizeof line, maps.get()) != nullptr) {
      unsigned long first = 0, last = 0, inode = 0;
      unsigned int high = 0, low = 0;
      const int fields =
          std::sscanf(line, "%lx-%lx %*4c %*x %x:%x %lu", &first, &last, &high, &low, &inode);
      if (fields == 5 && inode == facts.st_ino && makedev(high, low) == facts.st_dev) {
        mapped.emplace_back(reinterpret_cast<uint8_t*>(first), last - first);
      }
    }
#endif
  }

  ~Weights() {
    map.reset(); // its tables are in the loader's pages
    if (lock >= 0) {
      ::close(lock);
    }
  }

  et::Error open(const char* path, const char* packed_path, bool to_be_packed) {
    et::Error error = mapping.open(path);
    if (error != et::Error::Ok) {
      return error;
    }
    loader = std::make_unique<BufferDataLoader>(mapping.start(), mapping.size());
    auto loaded = FlatTensorDataMap::load(loader.get());
    if (!loaded.ok()) {
      return loaded.error();
    }
    map = std::make_unique<FlatTensorDataMap>(std::move(loaded.get()));
    packed = packed_path == nullptr ? "" : packed_path;
    packing = to_be_packed;
    if (packed.size() >= et::kMaxOptionValueLength) {
      ET_LOG(Error, "a path of %zu characters is too long for packed weights", packed.size());
      return et::Error::InvalidArgument;
    }
    if (!packed.empty() && !packing) {
      lock = ::open(packed.c_str(), O_RDONLY | O_CLOEXEC);
      if (lock < 0 || flock(lock, LOCK_SH | LOCK_NB) != 0) {
        ET_LOG(Error, "%s: %s", packed.c_str(), strerror(errno));
        return et::Error::AccessFailed;
      }
    }
    return et::Error::Ok;
  }
};

// Zeroed memory; pages take no memory until they are written.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ~Arena() {
    if (start_ != nullptr) {
      munmap(start_, size_);
    }
  }

  et::Error reserve(size_t size) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* start = mmap(nullptr, std::max(size, kAlignment), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (start == MAP_FAILED) {
      ET_LOG(Error, "there is not enough memory for %zu bytes of addresses", size);
      return et::Error::MemoryAllocationFailed;
    }
    start_ = static_cast<uint8_t*>(start);
    size_ = std::max(size, kAlignment);
    return et::Error::Ok;
  }

  uint8_t* start() const {
    return start_;
  }

  size_t size() const {
    return size_;
  }

 private:
  uint8_t* start_ = nullptr;
  size_t size_ = 0;
};

struct ProgramHandle {
  std::shared_ptr<File> file;
};

struct WeightsHandle {
  std::shared_ptr<Weights> weights;
};

struct ArenaHandle {
  std::shared_ptr<Arena> arena;
};

struct Input {
  std::vector<TensorImpl::SizesType> bounds;
  std::vector<TensorImpl::SizesType> sizes;
  std::vector<TensorImpl::DimOrderType> order;
  std::vector<TensorImpl::StridesType> strides;
  std::unique_ptr<TensorImpl> tensor;
  bool planned; // the method copies the input into its own memory
  bool is_set = false; // whether the method reads the tensor's current memory with its current sizes
};

struct Output {
  size_t rank;
  size_t most_bytes;
  bool planned;
  uint8_t* spare; // memory of an unplanned output if the caller's memory is smaller than its bound
  void* target = nullptr; // memory that the method writes an unplanned output to
};

struct MethodHandle {
  std::shared_ptr<File> file;
  std::shared_ptr<Weights> weights;
  std::shared_ptr<Arena> arena;
  std::vector<et::Span<uint8_t>> spans;
  MallocMemoryAllocator allocator;
  MallocMemoryAllocator temporary;
  std::unique_ptr<et::HierarchicalAllocator> planned;
  std::unique_ptr<et::MemoryManager> manager;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  bool broken = false;
  std::unique_ptr<et::Method> method; // last, so that it is destroyed before what it uses
};

size_t aligned(size_t size) {
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}

// Sizes of the parts of an arena that a method uses: its planned buffers, then its unplanned outputs.
et::Error parts(const et::MethodMeta& meta, std::vector<size_t>& buffers, std::vector<size_t>& spares) {
  for (size_t index = 0; index < meta.num_memory_planned_buffers(); ++index) {
    const auto bytes = meta.memory_planned_buffer_size(index);
    if (!bytes.ok()) {
      return bytes.error();
    }
    buffers.push_back(static_cast<size_t>(std::max<int64_t>(bytes.get(), 1)));
  }
  for (size_t index = 0; index < meta.num_outputs(); ++index) {
    const auto info = meta.output_tensor_meta(index);
    if (!info.ok()) {
      return info.error();
    }
    spares.push_back(info->is_memory_planned() ? 0 : info->nbytes());
  }
  return et::Error::Ok;
}

size_t sum(const std::vector<size_t>& sizes) {
  size_t bytes = 0;
  for (const size_t size : sizes) {
    bytes += aligned(size);
  }
  return bytes;
}

et::Error prepare_memory(MethodHandle& handle, const et::MethodMeta& meta) {
  std::vector<size_t> buffers, spares;
  et::Error error = parts(meta, buffers, spares);
  if (error != et::Error::Ok) {
    return error;
  }
  const size_t needed = sum(buffers) + sum(spares);
  if (handle.arena == nullptr) {
    handle.arena = std::make_shared<Arena>();
    error = handle.arena->reserve(needed);
    if (error != et::Error::Ok) {
      return error;
    }
  }
  if (handle.arena->size() < needed) {
    ET_LOG(Error, "the method needs %zu bytes of an arena that has %zu", needed, handle.arena->size());
    return et::Error::InvalidArgument;
  }
  uint8_t* next = handle.arena->start();
  for (const size_t size : buffers) {
    handle.spans.emplace_back(next, size);
    next += aligned(size);
  }
  for (size_t index = 0; index < spares.size(); ++index) {
    const auto info = meta.output_tensor_meta(index);
    handle.outputs.push_back({info->sizes().size(), info->nbytes(), info->is_memory_planned(), next});
    next += aligned(spares[index]);
  }
  handle.planned = std::make_unique<et::HierarchicalAllocator>(
      et::Span<et::Span<uint8_t>>(handle.spans.data(), handle.spans.size()));
  handle.manager = std::make_unique<et::MemoryManager>(
      &handle.allocator, handle.planned.get(), &handle.temporary);
  return et::Error::Ok;
}

et::Error prepare_inputs(MethodHandle& handle, const et::MethodMeta& meta) {
  for (size_t index = 0; index < meta.num_inputs(); ++index) {
    const auto info = meta.input_tensor_meta(index);
    if (!info.ok()) {
      return info.error();
    }
    const auto sizes = info->sizes();
    Input input;
    input.planned = info->is_memory_planned();
    input.bounds.assign(sizes.begin(), sizes.end());
    input.sizes = input.bounds;
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
        input.strides.data(),
        et::TensorShapeDynamism::DYNAMIC_BOUND);
    handle.inputs.push_back(std::move(input));
  }
  return et::Error::Ok;
}

et::Error set_input(MethodHandle& handle, size_t index, void* data, const int32_t* sizes) {
  Input& input = handle.inputs[index];
  // In a repeated sequence of calls, all inputs stay where they are.
  if (input.is_set && input.tensor->data() == data &&
      std::equal(input.sizes.begin(), input.sizes.end(), sizes)) {
    return et::Error::Ok;
  }
  input.is_set = false;
  for (size_t axis = 0; axis < input.bounds.size(); ++axis) {
    // The runtime compares only the numbers of elements.
    if (sizes[axis] > input.bounds[axis] || sizes[axis] < std::min(1, input.bounds[axis])) {
      ET_LOG(
          Error,
          "input %zu has size %d in axis %zu, must be in 1 to %d",
          index,
          static_cast<int>(sizes[axis]),
          axis,
          static_cast<int>(input.bounds[axis]));
      return et::Error::InvalidArgument;
    }
  }
  const Tensor tensor(input.tensor.get());
  et::Error error = et::resize_tensor(tensor, {sizes, input.bounds.size()});
  if (error != et::Error::Ok) {
    return error;
  }
  input.tensor->set_data(data);
  error = handle.method->set_input(et::EValue(tensor), index);
  input.is_set = error == et::Error::Ok && !input.planned;
  return error;
}

// A copy of rows, each of several parts, to one position of each part in a cache; see prge_run.
struct Store {
  const uint8_t* values;
  uint8_t* cache;
  const int64_t* positions;
  size_t rows;
  size_t parts;
  size_t part_bytes;
  size_t cache_part_bytes;
};

// One run of a method, and the copies after it; see prge_run.
struct Request {
  void* method;
  void* const* inputs;
  const int32_t* sizes;
  void* const* outputs;
  const size_t* room;
  int32_t* output_sizes;
  const Store* stores;
  size_t store_count;
};

void run(const Store& store) {
  const uint8_t* values = store.values;
  uint8_t* cache = store.cache;
  for (size_t row = 0; row < store.rows; ++row) {
    const size_t offset = static_cast<size_t>(store.positions[row]) * store.part_bytes;
    for (size_t part = 0; part < store.parts; ++part) {
      std::memcpy(cache + offset, values, store.part_bytes);
      values += store.part_bytes;
      cache += store.cache_part_bytes;
    }
  }
}

// Threads of the pool sleep after some microseconds without work and wake up slowly: this keeps them awake
// between two methods.
void keep_awake() {
  if (executorch::extension::threadpool::NoThreadPoolGuard::is_enabled()) {
    return;
  }
  auto* pool = executorch::extension::threadpool::get_threadpool();
  if (pool != nullptr && pool->get_thread_count() > 1) {
    pool->run([](size_t) {}, pool->get_thread_count());
  }
}

et::Error run(MethodHandle& handle, const Request& request) {
  et::Method& method = *handle.method;
  const int32_t* sizes = request.sizes;
  for (size_t index = 0; index < handle.inputs.size(); ++index) {
    const et::Error error = set_input(handle, index, request.inputs[index], sizes);
    if (error != et::Error::Ok) {
      return error;
    }
    sizes += handle.inputs[index].bounds.size();
  }
  for (size_t index = 0; index < handle.outputs.size(); ++index) {
    Output& output = handle.outputs[index];
    void* target = request.room[index] < output.most_bytes ? output.spare : request.outputs[index];
    if (!output.planned && output.target != target) {
      const et::Error error = method.set_output_data_ptr(target, output.most_bytes, index);
      if (error != et::Error::Ok) {
        return error;
      }
      output.target = target;
    }
  }
  keep_awake();
  const et::Error error = method.execute();
  if (error != et::Error::Ok) {
    return error;
  }
  int32_t* output_sizes = request.output_sizes;
  for (size_t index = 0; index < handle.outputs.size(); ++index) {
    const et::EValue& value = method.get_output(index);
    if (!value.isTensor() || value.toTensor().sizes().size() != handle.outputs[index].rank) {
      return et::Error::InvalidState;
    }
    const Tensor& tensor = value.toTensor();
    const size_t room = request.room[index];
    if (tensor.nbytes() > room) {
      ET_LOG(Error, "output %zu takes %zu bytes, there is room for %zu", index, tensor.nbytes(), room);
      return et::Error::InvalidArgument;
    }
    if (tensor.const_data_ptr() != request.outputs[index]) {
      std::memcpy(request.outputs[index], tensor.const_data_ptr(), tensor.nbytes());
    }
    output_sizes = std::copy(tensor.sizes().begin(), tensor.sizes().end(), output_sizes);
  }
  std::for_each_n(request.stores, request.store_count, [](const Store& store) { run(store); });
  return et::Error::Ok;
}

} // namespace

#pragma GCC visibility push(default)
extern "C" {

// Gets the size of the process's thread pool; a count above 0 sets it first, before any method is loaded.
int prge_threads(int count, int* size, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    auto* pool = executorch::extension::threadpool::get_threadpool();
    if (pool == nullptr) {
      return et::Error::InvalidState;
    }
    if (count > 0) {
      pool->_unsafe_reset_threadpool(static_cast<uint32_t>(count));
    }
    *size = static_cast<int>(pool->get_thread_count());
    return et::Error::Ok;
  });
}

// For a forked child, which lacks the pool's threads: from now on the calling thread does all work.
void prge_without_threads() {
  executorch::extension::threadpool::NoThreadPoolGuard::set_enabled(true);
}

// Maps a file and verifies its tables.
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

// Loaded methods keep the file.
void prge_close(void* program) {
  delete static_cast<ProgramHandle*>(program);
}

// The number of methods, and the name of one; null if there is none.
size_t prge_methods(void* program) {
  return static_cast<ProgramHandle*>(program)->file->program->num_methods();
}

const char* prge_method_name(void* program, size_t index) {
  const auto name = static_cast<ProgramHandle*>(program)->file->program->get_method_name(index);
  return name.ok() ? name.get() : nullptr;
}

// The number of inputs or outputs of a method.
int prge_count(void* program, const char* method, int outputs, size_t* count, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    const auto meta = static_cast<ProgramHandle*>(program)->file->program->method_meta(method);
    if (meta.ok()) {
      *count = outputs ? meta->num_outputs() : meta->num_inputs();
    }
    return meta.error();
  });
}

// Type, rank and sizes of one of them; at most `most` sizes.
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

// Maps a weights file. `packed`, which may be null, is the file of its packed weights: methods that are loaded
// with these weights write it if `packing` is set, and map it otherwise.
int prge_open_weights(
    const char* path, const char* packed, int packing, void** weights, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    auto opened = std::make_shared<Weights>();
    const et::Error error = opened->open(path, packed, packing != 0);
    if (error == et::Error::Ok) {
      *weights = new WeightsHandle{std::move(opened)};
    }
    return error;
  });
}

// Loaded methods keep the files.
void prge_close_weights(void* weights) {
  delete static_cast<WeightsHandle*>(weights);
}

// Releases the pages that methods have mapped of these weights, which stay loaded. Returns 0 if that fails.
int prge_give_back(void* weights) {
  return static_cast<WeightsHandle*>(weights)->weights->give_back();
}

// Gets the bytes of an arena that a method uses.
int prge_arena_bytes(void* program, const char* method, size_t* bytes, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    const auto meta = static_cast<ProgramHandle*>(program)->file->program->method_meta(method);
    if (!meta.ok()) {
      return meta.error();
    }
    std::vector<size_t> buffers, spares;
    const et::Error error = parts(meta.get(), buffers, spares);
    *bytes = sum(buffers) + sum(spares);
    return error;
  });
}

int prge_open_arena(size_t bytes, void** arena, char* text, size_t capacity) {
  return Call(text, capacity).run([&] {
    auto opened = std::make_shared<Arena>();
    const et::Error error = opened->reserve(bytes);
    if (error == et::Error::Ok) {
      *arena = new ArenaHandle{std::move(opened)};
    }
    return error;
  });
}

// Loaded methods keep the memory.
void prge_close_arena(void* arena) {
  delete static_cast<ArenaHandle*>(arena);
}

// Loads a method with its weights. If `arena` is null, the method gets its own memory.
int prge_load(
    void* program,
    const char* name,
    void* weights,
    void* arena,
    void** method,
    char* text,
    size_t capacity) {
  auto handle = std::unique_ptr<MethodHandle>();
  const int code = Call(text, capacity).run([&] {
    handle = std::make_unique<MethodHandle>();
    handle->file = static_cast<ProgramHandle*>(program)->file;
    handle->weights = static_cast<WeightsHandle*>(weights)->weights;
    if (arena != nullptr) {
      handle->arena = static_cast<ArenaHandle*>(arena)->arena;
    }
    const auto meta = handle->file->program->method_meta(name);
    if (!meta.ok()) {
      return meta.error();
    }
    et::Error error = prepare_memory(*handle, meta.get());
    if (error == et::Error::Ok) {
      error = prepare_inputs(*handle, meta.get());
    }
    if (error != et::Error::Ok) {
      return error;
    }
    const bool packed = !handle->weights->packed.empty();
    et::BackendOptions<3> options;
    et::LoadBackendOptionsMap map;
    error = options.set_option("weight_cache_enabled", packed);
    if (error == et::Error::Ok && packed) {
      error = options.set_option("packed_cache_path", handle->weights->packed.c_str());
    }
    if (error == et::Error::Ok && arena != nullptr) {
      error = options.set_option("workspace_sharing_mode", kOneWorkspaceForAll);
    }
    if (error == et::Error::Ok) {
      error = map.set_options("XnnpackBackend", options.view());
    }
    if (error != et::Error::Ok) {
      return error;
    }
    const Returning returning({&handle->file->mapping, &handle->weights->mapping});
    shares_packed_file = packed && !handle->weights->packing;
    auto loaded = handle->file->program->load_method(name, handle->manager.get(), nullptr, handle->weights->map.get(), &map);
    shares_packed_file = false;
    if (!loaded.ok()) {
      return loaded.error();
    }
    handle->method = std::make_unique<et::Method>(std::move(loaded.get()));
    // The backend keeps weights that it can't write to the packed file in memory, and only logs that.
    const std::lock_guard<std::mutex> guard(mappings_mutex);
    ++mappings;
    return packed && handle->weights->packing && logged() ? et::Error::AccessFailed : et::Error::Ok;
  });
  if (code == 0) {
    *method = handle.release();
  } else if (code == kFault) {
    handle.release(); // destroying it in the state after the fault is not safe
  }
  return code;
}

// Runs methods one after the other, up to the first that fails.
//
//     method          loaded by prge_load
//     inputs, sizes   contiguous arrays of the method's types in its order, and the sizes of all their axes
//     outputs, room   memory that overlaps no input, and its bytes; if it holds the program's bound of an
//                     unplanned output, the output is written there without a copy
//     output_sizes    the sizes of all axes of the outputs
//     stores          copies of outputs to the current positions of their rows in caches [rows, parts, positions]
int prge_run(const Request* requests, size_t count, char* text, size_t capacity) {
  MethodHandle* handle = nullptr;
  const int code = Call(text, capacity).run([&] {
    et::Error error = et::Error::Ok;
    for (size_t index = 0; index < count && error == et::Error::Ok; ++index) {
      handle = static_cast<MethodHandle*>(requests[index].method);
      error = handle->broken ? et::Error::InvalidState : run(*handle, requests[index]);
    }
    return error;
  });
  if (code == kFault && handle != nullptr) {
    handle->broken = true;
  }
  return code;
}

void prge_unload(void* method) {
  auto* handle = static_cast<MethodHandle*>(method);
  if (!handle->broken) {
    const std::lock_guard<std::mutex> guard(mappings_mutex);
    ++mappings;
    delete handle;
  }
}

} // extern "C"
#pragma GCC visibility pop
