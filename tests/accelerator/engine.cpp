#include "engine.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <Python.h>
#include <frameobject.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>

namespace sim {
namespace {

void merge(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t n = 0; n < other.size(); ++n) into[n] = std::max(into[n], other[n]);
}

uint64_t at(const Clock& clock, int stream) { return size_t(stream) < clock.size() ? clock[stream] : 0; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void add(std::vector<std::string>& reports, const std::string& one) {
  if (std::find(reports.begin(), reports.end(), one) == reports.end()) reports.push_back(one);
}

constexpr size_t kLeast = 512;

bool is_aside() {  // of training, which has the main thread and autograd's
  thread_local const bool found = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    return gettid() != getpid() && std::string(name).rfind("pt_autograd", 0) != 0;
  }();
  return found;
}

}  // namespace

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

Place here(const std::string& what) {
  Place place{what, ""};
  if (!Py_IsInitialized()) return place;
  const auto& library = Engine::get().library();
  auto gil = PyGILState_Ensure();
  std::string innermost;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  int shown = 0;
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string file = PyUnicode_AsUTF8(code->co_filename);
    Py_DECREF(code);
    const bool is_library = !library.empty() && file.rfind(library, 0) == 0;
    const bool is_torch = file.find("/torch/") != std::string::npos;
    if (!is_torch && file[0] != '<' && shown < 4) {
      auto line = (is_library ? file.substr(library.size()) : file.substr(file.rfind('/') + 1)) + ":" +
                  std::to_string(PyFrame_GetLineNumber(frame));
      place.text += (shown++ ? " < " : " at ") + line;
      if (is_library && place.library.empty()) place.library = line;
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(gil);
  return place;
}

Engine& Engine::get() {
  static Engine* engine = new Engine();  // never destroyed: tensors may outlive the interpreter
  return *engine;
}

Engine::Engine() { configure(1, false, ""); }

void Engine::configure(int devices, bool late, std::string library) {
  std::lock_guard<std::mutex> lock(mutex_);
  devices_ = devices;
  late_ = late;
  library_ = std::move(library);
  drop_what_.clear();
  home_ = -1;
  in_use_.resize(devices);
  most_.resize(devices);
  for (Stream& stream : streams_) stream.trains = false;
  for (int device = int(streams_.size()); device < devices; ++device) streams_.push_back({device, {}, nullptr, {}});
}

int Engine::new_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back({device, {}, nullptr, {}});
  return int(streams_.size()) - 1;
}

int Engine::device_of(int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return streams_.at(stream).device;
}

ItemPtr Engine::issue(int stream, const std::string& what, const std::vector<Span>& spans, std::function<void()> work,
                      Work kind, std::function<std::string()> missing) {
  const Place place = here(what);
  const bool aside = is_aside();
  check_home(device_of(stream), what);
  std::lock_guard<std::mutex> lock(mutex_);
  throw_failure();
  auto [entry, is_new] = site_numbers_.try_emplace(place.text, int(sites_.size()));
  if (is_new) sites_.push_back(place.text);
  Stream& to = streams_.at(stream);
  if (!aside) to.trains = to.trains || kind != Work::event;
  else if (kind == Work::kernel) note_fault("launches a kernel: " + place.text);
  else if (kind == Work::message) note_fault("calls a collective: " + place.text);
  else if (!trains_on(to.device)) note_fault("works on another device than training: " + place.text);
  else if (to.trains) note_fault("takes its turn on a stream of training: " + place.text);
  merge(to.clock, host_);
  if (to.clock.size() <= size_t(stream)) to.clock.resize(stream + 1);
  ++to.clock[stream];
  auto item = std::make_shared<Item>();
  item->kind = kind;
  std::vector<std::string> unless_stuck;
  for (const Span& span : spans) {
    if (span.end > span.begin) check(stream, span, entry->second, item, aside, unless_stuck);
  }
  item->what = place.text;
  item->work = std::move(work);
  item->missing = std::move(missing);
  item->after = std::move(to.awaits);
  to.awaits.clear();
  if (to.last) item->after.push_back(to.last);
  for (const auto& earlier : item->after) {
    if (earlier->done) continue;
    earlier->before.push_back(item);
    ++item->pending;
  }
  to.last = item;
  if (!unless_stuck.empty() && !stuck_behind(item)) {
    for (const auto& race : unless_stuck) report(race);
  }
  if (!late_) want(item);
  if (!is_running_) {
    is_running_ = true;
    std::thread([this] { loop(); }).detach();
  }
  return item;
}

void Engine::check(int stream, const Span& span, int site, const ItemPtr& item, bool is_aside,
                   std::vector<std::string>& unless_stuck) {
  Block* block = find(span.begin);
  if (block == nullptr) return;
  if (item->kind != Work::copy && block->device != streams_[stream].device) {
    add(faults_, "device " + std::to_string(streams_[stream].device) + " uses memory of device " +
                     std::to_string(block->device) + ": " + sites_[site]);
  }
  const Clock& clock = streams_[stream].clock;
  auto& accesses = block->accesses;
  for (const Access& other : accesses) {
    if (other.end <= span.begin || span.end <= other.begin || !(other.is_write || span.is_write)) continue;
    if (at(clock, other.stream) >= other.count) continue;
    const auto race = std::string(span.is_write ? "write" : "read") + " by " + sites_[site] + " (stream " +
                      std::to_string(stream) + "), not ordered after the " + (other.is_write ? "write" : "read") +
                      " by " + sites_[other.site] + " (stream " + std::to_string(other.stream) + ")";
    if (is_aside == other.is_aside || (is_aside && other.item->done)) report(race);
    else if (other.item->done) unless_stuck.push_back(race);  // what the thread aside did is over
    else if (is_aside) item->races_unless_stuck.emplace_back(other.item, race);
    else other.item->races_unless_stuck.emplace_back(item, race);
  }
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                [&](const Access& other) {
                                  const bool is_covered = span.begin <= other.begin && other.end <= span.end;
                                  return is_covered && (span.is_write || (!other.is_write && other.stream == stream));
                                }),
                 accesses.end());
  Access access;
  static_cast<Span&>(access) = span;
  access.stream = stream;
  access.count = clock[stream];
  access.site = site;
  access.item = item;
  access.is_aside = is_aside;
  accesses.push_back(access);
}

void Engine::report(const std::string& race) { add(races_, race); }

Moment Engine::record(int stream) {
  auto item = issue(stream, "event", {}, [] {}, Work::event);
  std::lock_guard<std::mutex> lock(mutex_);
  return {item, streams_.at(stream).clock, now()};
}

void Engine::wait_for(int stream, const Moment& moment) {
  if (!moment.item || drops("wait")) return;
  check_home(device_of(stream), "wait");
  std::lock_guard<std::mutex> lock(mutex_);
  Stream& to = streams_.at(stream);
  merge(to.clock, moment.clock);
  if (!moment.item->done) to.awaits.push_back(moment.item);
}

// Host synchronisation

void Engine::note_sync(const std::string& what) {
  const Place place = here(what);
  std::lock_guard<std::mutex> lock(mutex_);
  syncs_.push_back({what, place.library});
}

void Engine::finish(const Moment& moment) {
  if (!moment.item) return;
  const bool aside = is_aside();
  const Place place = aside ? here("waits") : Place();
  WithoutGil released;
  std::vector<std::shared_ptr<void>> let_go;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!moment.item->done) {
    const auto behind = aside ? stuck_behind(moment.item) : nullptr;
    if (behind) note_fault(place.text + " for " + behind->what + ", which " + behind->missing() + " has not called");
    merge(moment.item->awaited, moment.clock);
    want(moment.item);
    done_.wait(lock, [&] { return moment.item->done || !failure_.empty(); });
  }
  throw_failure();
  learn(moment.clock);
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    if (at(host_, std::get<0>(*kept)) >= std::get<1>(*kept)) {
      let_go.push_back(std::move(std::get<2>(*kept)));
      kept = kept_.erase(kept);
    } else {
      ++kept;
    }
  }
  lock.unlock();  // destroying tensors takes it again
}

void Engine::finish_device(int device) {
  blame("synchronizes a device");
  size_t count;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    count = streams_.size();
  }
  for (size_t stream = 0; stream < count; ++stream) {
    if (device < 0 || device_of(int(stream)) == device) finish(record(int(stream)));
  }
}

bool Engine::is_done(const Moment& moment) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (moment.item && !moment.item->done) {
    if (is_aside()) want(moment.item);  // it asks until the work is done
    return false;
  }
  learn(moment.clock);
  return true;
}

void Engine::keep_until_done(int stream, std::shared_ptr<void> kept) {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.emplace_back(stream, at(streams_.at(stream).clock, stream), std::move(kept));
}

void Engine::learn(const Clock& clock) { merge(host_, clock); }

// Memory

char* Engine::allocate(size_t size, int device, int stream) {
  if (size == 0) return nullptr;
  size = (size + kLeast - 1) / kLeast * kLeast;
  const Place place = here("allocation");
  blame("allocates on the device");
  check_home(device, "allocation");
  std::lock_guard<std::mutex> lock(mutex_);
  auto& pool = free_[{device, stream}];
  auto best = pool.end();
  for (auto block = pool.begin(); block != pool.end(); ++block) {
    const bool is_free = std::all_of((*block)->awaited.begin(), (*block)->awaited.end(),
                                     [&](const auto& use) { return at(host_, use.first) >= use.second; });
    if (is_free && (*block)->size >= size && (*block)->size <= 4 * size &&
        (best == pool.end() || (*block)->size <= (*best)->size)) {
      best = block;
    }
  }
  Block* block;
  if (best != pool.end()) {
    block = *best;
    pool.erase(best);
    merge(streams_.at(stream).clock, host_);
    const Clock& clock = streams_[stream].clock;
    for (const Access& access : block->accesses) {
      if (at(clock, access.stream) < access.count) {
        report(place.text + " (stream " + std::to_string(stream) + ") hands out memory that " +
                         sites_[access.site] + " (stream " + std::to_string(access.stream) + ") may still use");
      }
    }
    block->accesses.erase(
        std::remove_if(block->accesses.begin(), block->accesses.end(),
                       [&](const Access& access) { return at(clock, access.stream) < access.count; }),
        block->accesses.end());
  } else {
    block = new Block{static_cast<char*>(std::aligned_alloc(kLeast, size)), size, device, stream, {}, {}, {}};
    blocks_[uintptr_t(block->memory)] = block;
  }
  block->recorded.clear();
  block->awaited.clear();
  in_use_[device] += int64_t(block->size);
  most_[device] = std::max(most_[device], in_use_[device]);
  return block->memory;
}

void Engine::free(char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = blocks_.at(uintptr_t(memory));
  for (int stream : block->recorded) block->awaited.emplace_back(stream, at(streams_[stream].clock, stream));
  in_use_[block->device] -= int64_t(block->size);
  free_[{block->device, block->stream}].push_back(block);
}

void Engine::record_use(const void* memory, int stream) {
  if (drops("record_stream")) return;
  check_home(device_of(stream), "record_stream");
  std::lock_guard<std::mutex> lock(mutex_);
  Block* block = find(uintptr_t(memory));
  if (block != nullptr && block->stream != stream) block->recorded.push_back(stream);
}

int Engine::device_at(const void* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Block* block = find(uintptr_t(memory));
  return block == nullptr ? -1 : block->device;
}

int64_t Engine::allocated(int device, bool most) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (most) return std::exchange(most_.at(device), in_use_.at(device));
  return in_use_.at(device);
}

Block* Engine::find(uintptr_t address) {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < uintptr_t(block->memory) + block->size ? block : nullptr;
}

// Faults of threads aside

void Engine::blame(const std::string& what) {
  if (!is_aside()) return;
  const Place place = here(what);
  std::lock_guard<std::mutex> lock(mutex_);
  note_fault(place.text);
}

void Engine::note_fault(const std::string& fault) { add(faults_, "a thread aside of training " + fault); }

void Engine::check_home(int device, const std::string& what) {
  const int home = home_;
  if (home < 0 || device == home) return;
  const Place place = here(what);
  std::lock_guard<std::mutex> lock(mutex_);
  add(faults_, "works on device " + std::to_string(device) + ", not on " + std::to_string(home) + ": " + place.text);
}

bool Engine::trains_on(int device) {
  return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& one) { return one.trains && one.device == device; });
}

// A message that an item waits for and that a rank has not called, or null.
ItemPtr Engine::stuck_behind(const ItemPtr& first) {
  std::vector<ItemPtr> stack{first};
  std::set<Item*> seen;
  while (!stack.empty()) {
    const ItemPtr item = stack.back();
    stack.pop_back();
    if (item->done || !seen.insert(item.get()).second) continue;
    if (item->missing && !item->missing().empty()) return item;
    stack.insert(stack.end(), item->after.begin(), item->after.end());
  }
  return nullptr;
}

// The executor

void Engine::want(const ItemPtr& first) {
  std::vector<ItemPtr> stack{first};
  while (!stack.empty()) {
    const ItemPtr item = stack.back();
    stack.pop_back();
    if (item->done || item->is_wanted) continue;
    item->is_wanted = true;
    if (item->pending == 0) make_ready(item);
    stack.insert(stack.end(), item->after.begin(), item->after.end());
  }
}

void Engine::make_ready(const ItemPtr& item) {
  if (item->kind == Work::message) {
    std::thread([this, item] { run(item); }).detach();
  } else {
    ready_.push_back(item);
    work_.notify_one();
  }
}

void Engine::run(const ItemPtr& item) {
  at::set_num_threads(1);  // the same bits whenever an operation runs; the setting is per thread
  try {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    auto work = std::move(item->work);
    if (work) work();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    fail(item->what + ": " + text.substr(0, text.find("\nException raised from")));
  }
  complete(item);
}

void Engine::complete(const ItemPtr& item) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [other, race] : item->races_unless_stuck) {
    if (other->done || !stuck_behind(other)) report(race);
  }
  item->done = true;
  learn(item->awaited);  // here: its thread may wake up after others have gone on
  for (const auto& later : item->before) {
    if (--later->pending == 0 && later->is_wanted) make_ready(later);
  }
  item->before.clear();
  item->after.clear();
  item->races_unless_stuck.clear();
  item->missing = nullptr;
  done_.notify_all();
}

void Engine::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (!ready_.empty()) {
      ItemPtr item = ready_.front();
      ready_.pop_front();
      lock.unlock();
      run(item);
      item.reset();
      lock.lock();
      continue;
    }
    auto polls = late_ ? polls_ : std::vector<std::function<ItemPtr()>>();
    lock.unlock();
    std::vector<ItemPtr> asked;
    for (const auto& poll : polls) asked.push_back(poll());
    lock.lock();
    for (const auto& item : asked) {
      if (item) want(item);
    }
    if (ready_.empty()) work_.wait_for(lock, std::chrono::milliseconds(polls.empty() ? 100 : 1));
  }
}

void Engine::on_idle(std::function<ItemPtr()> poll) {
  std::lock_guard<std::mutex> lock(mutex_);
  polls_.push_back(std::move(poll));
}

void Engine::log_message(Message message) {
  std::lock_guard<std::mutex> lock(mutex_);
  messages_.push_back(std::move(message));
}

void Engine::fail(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = error;
  done_.notify_all();
}

void Engine::throw_failure() {
  if (!failure_.empty()) throw std::runtime_error("The simulated accelerator has failed: " + failure_);
}

// Reports

std::vector<std::string> Engine::races() {
  std::lock_guard<std::mutex> lock(mutex_);
  return races_;
}

std::vector<std::string> Engine::faults() {
  std::lock_guard<std::mutex> lock(mutex_);
  return faults_;
}

std::vector<HostSync> Engine::syncs() {
  std::lock_guard<std::mutex> lock(mutex_);
  return syncs_;
}

std::vector<Message> Engine::messages() {
  std::lock_guard<std::mutex> lock(mutex_);
  return messages_;
}

void Engine::clear_reports() {
  std::lock_guard<std::mutex> lock(mutex_);
  races_.clear();
  faults_.clear();
  syncs_.clear();
  messages_.clear();
}

void Engine::drop_next(const std::string& what, const std::string& line) {
  std::lock_guard<std::mutex> lock(mutex_);
  drop_what_ = what;
  drop_line_ = line;
}

bool Engine::drops(const std::string& what) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (drop_what_ != what) return false;
  }
  return here(what).text.find(drop_line_) != std::string::npos;
}

}  // namespace sim
