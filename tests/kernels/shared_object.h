// A shared object, opened at run time, and what it offers.
#pragma once

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

static void* open_object(const char* path) { return (void*)LoadLibraryA(path); }
static void* offered(void* object, const char* name) { return (void*)GetProcAddress((HMODULE)object, name); }
#else
#include <dlfcn.h>

static void* open_object(const char* path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
static void* offered(void* object, const char* name) { return dlsym(object, name); }
#endif
