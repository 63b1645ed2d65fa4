/* pyconfig.h of Python on Windows x86-64, as far as what includes Python.h reads it: compiled by clang over mingw-w64. */
#ifndef Py_CONFIG_H
#define Py_CONFIG_H

#include <io.h>

#define MS_WIN32
#define MS_WIN64
#define MS_WINDOWS
#define NT_THREADS
#define PLATFORM "win32"

/* What Python has lies in a DLL. */
#define HAVE_DECLSPEC_DLL
#define HAVE_DYNAMIC_LOADING
#define Py_ENABLE_SHARED 1

#define WITH_DOC_STRINGS 1
#define WITH_PYMALLOC 1

#define HAVE_SSIZE_T 1
#define HAVE_STDDEF_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_UINTPTR_T 1
#define HAVE_WCHAR_H 1
#define STDC_HEADERS 1

#define SIZEOF_DOUBLE 8
#define SIZEOF_FLOAT 4
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_OFF_T 4
#define SIZEOF_PID_T 8
#define SIZEOF_SHORT 2
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_UINTPTR_T 8
#define SIZEOF_VOID_P 8
#define SIZEOF_WCHAR_T 2
#define SIZEOF__BOOL 1

#endif
