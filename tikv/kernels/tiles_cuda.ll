; Steps of `tiles_cuda.py` on registers, which LLVM inlines. Their float32 arithmetic is never fused or approximated, and
; Taichi compiles one call faster than the operations within.
;
; Pointers are to local variables of a kernel, the only ones that Taichi hands out. Assembled, also after every change of
; this file, by
;
;     llvm-as-14 tiles_cuda.ll -o tiles_cuda.bc

target triple = "nvptx64-nvidia-cuda"

; x: a NaN as 0, limited to float16's numbers; 0 if it is below 2**-80
define void @limit(float* %p) alwaysinline {
  %x = load float, float* %p
  %nan = fcmp uno float %x, %x
  %n = select i1 %nan, float 0.0, float %x
  %l = call float asm "max.f32 $0, $1, $2;", "=f,f,f"(float %n, float -65504.0)
  %h = call float asm "min.f32 $0, $1, $2;", "=f,f,f"(float %l, float 65504.0)
  %a = call float asm "abs.f32 $0, $1;", "=f,f"(float %h)
  %tiny = fcmp olt float %a, 0x3AF0000000000000
  %y = select i1 %tiny, float 0.0, float %h
  store float %y, float* %p
  ret void
}

; x and the number of the lane at a distance: their sum, or in the upper lane their difference
define void @turn_lanes(float* %p, i32* %pdistance, i32* %pupper) alwaysinline convergent {
  %x = load float, float* %p
  %d = load i32, i32* %pdistance
  %u = load i32, i32* %pupper
  %b = bitcast float %x to i32
  %c = call i32 asm sideeffect "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r"(i32 %b, i32 %d) convergent
  %o = bitcast i32 %c to float
  %m = fneg float %x
  %upper = icmp ne i32 %u, 0
  %mine = select i1 %upper, float %m, float %x
  %y = call float asm "add.rn.f32 $0, $1, $2;", "=f,f,f"(float %o, float %mine)
  store float %y, float* %p
  ret void
}

; the sum and the difference of x and y
define void @turn_pair(float* %p, float* %q) alwaysinline {
  %x = load float, float* %p
  %y = load float, float* %q
  %s = call float asm "add.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %y)
  %d = call float asm "sub.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %y)
  store float %s, float* %p
  store float %d, float* %q
  ret void
}

; x n; 0 if it is below 2**-80
define void @norm(float* %p, float* %pn) alwaysinline {
  %x = load float, float* %p
  %n = load float, float* %pn
  %m = call float asm "mul.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %n)
  %a = call float asm "abs.f32 $0, $1;", "=f,f"(float %m)
  %tiny = fcmp olt float %a, 0x3AF0000000000000
  %y = select i1 %tiny, float 0.0, float %m
  store float %y, float* %p
  ret void
}

; r = x y
define void @multiply(float* %r, float* %px, float* %py) alwaysinline {
  %x = load float, float* %px
  %y = load float, float* %py
  %q = call float asm "mul.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %y)
  store float %q, float* %r
  ret void
}

; r = x / y
define void @divide(float* %r, float* %px, float* %py) alwaysinline {
  %x = load float, float* %px
  %y = load float, float* %py
  %q = call float asm "div.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %y)
  store float %q, float* %r
  ret void
}

; r = 1 / x
define void @invert(float* %r, float* %px) alwaysinline {
  %x = load float, float* %px
  %q = call float asm "rcp.rn.f32 $0, $1;", "=f,f"(float %x)
  store float %q, float* %r
  ret void
}

; r = x / y, where z = 1 / y. The second quotient is less than a unit in the last place off, and the third, by Markstein's
; theorem, is the nearest float32, if x / y and the remainders are not below what a float32 can have: 2**-149.
define void @divide_by(float* %r, float* %px, float* %py, float* %pz) alwaysinline {
  %x = load float, float* %px
  %y = load float, float* %py
  %z = load float, float* %pz
  %n = fneg float %y
  %q0 = call float asm "mul.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %z)
  %r0 = call float asm "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"(float %q0, float %n, float %x)
  %q1 = call float asm "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"(float %r0, float %z, float %q0)
  %r1 = call float asm "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"(float %q1, float %n, float %x)
  %q2 = call float asm "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"(float %r1, float %z, float %q1)
  store float %q2, float* %r
  ret void
}

; sum += x
define void @add(float* %r, float* %px) alwaysinline {
  %s = load float, float* %r
  %x = load float, float* %px
  %t = call float asm "add.rn.f32 $0, $1, $2;", "=f,f,f"(float %s, float %x)
  store float %t, float* %r
  ret void
}

; sum += (x - mean)**2, where distances below 2**-60 count as 0
define void @add_square(float* %r, float* %px, float* %pm) alwaysinline {
  %s = load float, float* %r
  %x = load float, float* %px
  %m = load float, float* %pm
  %d = call float asm "sub.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %m)
  %a = call float asm "abs.f32 $0, $1;", "=f,f"(float %d)
  %tiny = fcmp olt float %a, 0x3C30000000000000
  %e = select i1 %tiny, float 0.0, float %a
  %q = call float asm "mul.rn.f32 $0, $1, $2;", "=f,f,f"(float %e, float %e)
  %t = call float asm "add.rn.f32 $0, $1, $2;", "=f,f,f"(float %s, float %q)
  store float %t, float* %r
  ret void
}

; r = the root of x / n
define void @deviation(float* %r, float* %px, float* %pn) alwaysinline {
  %x = load float, float* %px
  %n = load float, float* %pn
  %q = call float asm "div.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %n)
  %t = call float asm "sqrt.rn.f32 $0, $1;", "=f,f"(float %q)
  store float %t, float* %r
  ret void
}

; r = the code of x, at most the last: how many scales it is above the least number, of two codes the even one
define void @code(i32* %r, float* %px, float* %plow, float* %pscale, i32* %plast) alwaysinline {
  %x = load float, float* %px
  %low = load float, float* %plow
  %scale = load float, float* %pscale
  %last = load i32, i32* %plast
  %d = call float asm "sub.rn.f32 $0, $1, $2;", "=f,f,f"(float %x, float %low)
  %q = call float asm "div.rn.f32 $0, $1, $2;", "=f,f,f"(float %d, float %scale)
  %c = call i32 asm "cvt.rni.s32.f32 $0, $1;", "=r,f"(float %q)
  %m = call i32 asm "min.s32 $0, $1, $2;", "=r,r,r"(i32 %c, i32 %last)
  store i32 %m, i32* %r
  ret void
}
