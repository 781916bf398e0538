(** Yeo and Johnson's power transform and its negative log-likelihood, as in
    chapter 210: psi(x; lambda) = s (exp(eta l) - 1) / eta with s the sign of x
    (+1 at 0), l = ln (1 + |x|) and eta = 1 + s (lambda - 1); it is s l where
    eta = 0. *)
From Coq Require Import Reals List Lra.
From normalnorm Require Import sums.
Open Scope R_scope.

Definition sign (x : R) : R := if Rle_dec 0 x then 1 else -1.

Definition slog (x : R) : R := sign x * ln (1 + Rabs x).

(** (exp(eta l) - 1) / eta, and its limit where eta = 0. *)
Definition expm1_over (eta l : R) : R :=
  if Req_EM_T eta 0 then l else (exp (eta * l) - 1) / eta.

Definition psi (x lambda : R) : R :=
  sign x * expm1_over (1 + sign x * (lambda - 1)) (ln (1 + Rabs x)).

(** The variance of the transformed sample, with 1/N. *)
Definition variance (h : list R) (lambda : R) : R :=
  mean (fun x => (psi x lambda - mean (fun x => psi x lambda) h) ^ 2) h.

(** The profile negative log-likelihood, a mean over the elements. *)
Definition nll (h : list R) (lambda : R) : R :=
  (ln (2 * PI) + 1) / 2 + ln (variance h lambda) / 2
  - (lambda - 1) * mean slog h.

Lemma abs_pos_1 x : 0 < 1 + Rabs x.
Proof. pose proof (Rabs_pos x); lra. Qed.

Lemma variance_squares h lambda : h <> nil ->
  variance h lambda
  = mean (fun x => psi x lambda ^ 2) h - mean (fun x => psi x lambda) h ^ 2.
Proof.
  intros some. unfold variance. set (m := mean (fun x => psi x lambda) h).
  rewrite (mean_ext _ (fun x => psi x lambda ^ 2
    + ((-2 * m) * psi x lambda + m ^ 2))) by (intros; ring).
  rewrite !mean_plus, mean_scal, mean_const by easy. fold m; ring.
Qed.
