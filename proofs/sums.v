(** Finite sums and means over lists, which the theorems are stated in. A list
    has any length; its entries are numbers, or names of samples and units. *)
From Coq Require Import Reals List Lra.
Open Scope R_scope.

Definition sum {A} (f : A -> R) (l : list A) : R :=
  fold_right (fun x s => f x + s) 0 l.

Definition mean {A} (f : A -> R) (l : list A) : R :=
  sum f l / INR (length l).

Section Sums.
Context {A : Type}.
Implicit Types (f g : A -> R) (l : list A).

Lemma sum_ext f g l : (forall x, In x l -> f x = g x) -> sum f l = sum g l.
Proof.
  induction l as [|x l IH]; simpl; intros same; [easy|].
  rewrite (same x (or_introl eq_refl)), IH; auto.
Qed.

Lemma sum_plus f g l : sum (fun x => f x + g x) l = sum f l + sum g l.
Proof. induction l as [|x l IH]; simpl; [ring|]. rewrite IH; ring. Qed.

Lemma sum_scal c f l : sum (fun x => c * f x) l = c * sum f l.
Proof. induction l as [|x l IH]; simpl; [ring|]. rewrite IH; ring. Qed.

Lemma sum_const c l : sum (fun _ => c) l = INR (length l) * c.
Proof.
  induction l as [|x l IH]; [simpl; ring|].
  change (length (x :: l)) with (S (length l)).
  rewrite S_INR; simpl; rewrite IH; ring.
Qed.

Lemma sum_le f g l : (forall x, In x l -> f x <= g x) -> sum f l <= sum g l.
Proof.
  induction l as [|x l IH]; simpl; intros le; [lra|].
  apply Rplus_le_compat; auto.
Qed.

Lemma sum_nonneg f l : (forall x, In x l -> 0 <= f x) -> 0 <= sum f l.
Proof.
  intros pos. replace 0 with (sum (fun _ : A => 0) l).
  - now apply sum_le.
  - rewrite sum_const; ring.
Qed.

(** A sum of numbers that are not negative is 0 only if each of them is. *)
Lemma sum_zero f l :
  (forall x, In x l -> 0 <= f x) -> sum f l = 0 ->
  forall x, In x l -> f x = 0.
Proof.
  induction l as [|y l IH]; simpl; intros pos zero x; [easy|].
  assert (0 <= f y) by auto.
  assert (0 <= sum f l) by (apply sum_nonneg; auto).
  intros [<-|inside]; [lra|]. apply IH; auto; lra.
Qed.

Lemma length_pos l : l <> nil -> 0 < INR (length l).
Proof.
  destruct l as [|x l]; [easy|]. intros _. apply lt_0_INR; simpl.
  apply PeanoNat.Nat.lt_0_succ.
Qed.

Lemma mean_ext f g l : (forall x, In x l -> f x = g x) -> mean f l = mean g l.
Proof. intros same. unfold mean. now rewrite (sum_ext _ _ _ same). Qed.

Lemma mean_plus f g l : mean (fun x => f x + g x) l = mean f l + mean g l.
Proof. unfold mean; rewrite sum_plus. unfold Rdiv; ring. Qed.

Lemma mean_scal c f l : mean (fun x => c * f x) l = c * mean f l.
Proof. unfold mean; rewrite sum_scal. unfold Rdiv; ring. Qed.

Lemma mean_const c l : l <> nil -> mean (fun _ => c) l = c.
Proof.
  intros some. unfold mean; rewrite sum_const.
  field. apply Rgt_not_eq, length_pos; easy.
Qed.

Lemma mean_nonneg f l :
  l <> nil -> (forall x, In x l -> 0 <= f x) -> 0 <= mean f l.
Proof.
  intros some pos. apply Rmult_le_pos; [now apply sum_nonneg|].
  apply Rlt_le, Rinv_0_lt_compat, length_pos; easy.
Qed.

Lemma mean_le f g l :
  l <> nil -> (forall x, In x l -> f x <= g x) -> mean f l <= mean g l.
Proof.
  intros some le. apply Rmult_le_compat_r; [|now apply sum_le].
  apply Rlt_le, Rinv_0_lt_compat, length_pos; easy.
Qed.

Lemma mean_zero f l :
  (forall x, In x l -> 0 <= f x) -> mean f l = 0 ->
  forall x, In x l -> f x = 0.
Proof.
  intros pos zero x inside. apply (sum_zero f l); auto.
  assert (some : l <> nil) by (now intros ->).
  apply (Rmult_eq_reg_r (/ INR (length l))).
  - rewrite Rmult_0_l; exact zero.
  - apply Rinv_neq_0_compat, Rgt_not_eq, length_pos; easy.
Qed.

End Sums.

Lemma sum_swap {A B} (f : A -> B -> R) (l : list A) (m : list B) :
  sum (fun x => sum (f x) m) l = sum (fun y => sum (fun x => f x y) l) m.
Proof.
  induction l as [|x l IH]; simpl.
  - induction m as [|y m IH]; simpl; [easy|]. rewrite <- IH; ring.
  - rewrite IH, sum_plus; ring.
Qed.
